// Memory for results and workspaces.

#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/allocation.h"

namespace trifuse {

// Returns an uninitialised CPU tensor, like at::empty.
//
// A fresh result causes a page fault for every 4 KiB when it is first written, which takes longer
// than everything else in a memory-bound kernel. The C library may return even 128 KiB to the
// system whenever they are freed. So results of 128 KiB and more come from blocks that are cached
// when they are freed, up to TRIFUSE_CPU_CACHE_MIB in all (256 unless set; 0 caches none). Results
// of more than 1 MiB have pages of 2 MiB.
at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);

// Returns `bytes` bytes of such memory, as the workspace of a call.
at::Tensor workspace(int64_t bytes);

}  // namespace trifuse
