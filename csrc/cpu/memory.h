// Memory for results.

#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/allocation.h"

namespace trifuse {

// Uninitialised, as at::empty, on a CPU.
//
// A fresh result costs a page fault for every 4 KiB when it is first written: more time than a kernel
// that passes memory through has for all else. The C library gives large blocks back to the system
// as soon as they are freed. So results of 1 MiB and more come from blocks that are kept when they
// are freed, up to TRIFUSE_CPU_CACHE_MIB in all (256 unless set; 0 keeps none), and that ask the
// system for pages of 2 MiB.
at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);

// So many bytes of such memory, for a call to work in.
at::Tensor workspace(int64_t bytes);

}  // namespace trifuse
