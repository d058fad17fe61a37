"""Replaces calls in a graph of Dynamo by calls that mean the same, or leaves the graph as it is.

A pattern finds nodes and their replacement. Whether the exchange is safe does not depend on the
pattern, and is decided here. Nothing else may use what is left out, nothing may change a tensor in
between, and later code must get the shapes, dtypes and strides that it relies on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from trifuse.compiler.calls import (
    Refused,
    is_in_place,
    plain,
    read,
    require,
    same,
    same_shape,
    tensor,
    value,
    writes,
)


class Rewriter:
    """One graph, and how its nodes are replaced."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        # Dynamo calls backends under a fake tensor mode other than that of the graph's tensors.
        fakes: Iterator[Any] = filter(lambda fake: fake is not None, map(tensor, graph.nodes))
        self.fake_mode: Any = next((fake.fake_mode for fake in fakes), None)
        self._new: list[Node] = []
        self._at: Any = None  # the node before which the new ones are inserted
        # Memory of new tensors, and that of the tensors they replaced, which views of these show.
        self._memories: dict[int, int] = {}
        self._replaced: list[Any] = []  # kept, as memory that is freed may get another tensor

    def erase_unused_copies(self) -> None:
        """Erases views, copies and casts that nothing uses, such as those of returned scores."""
        for node in reversed(self.graph.nodes):
            call = None if node.users else read(node)
            if call is not None and call.op in ("view", "cast") and not writes(node):
                self.graph.erase_node(node)

    # New nodes ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def inserting(self, at: Node) -> Iterator[None]:
        """Makes ``call`` insert nodes before ``at``; new nodes that end up unused are erased."""
        self._new, self._at = [], at
        try:
            with self.graph.inserting_before(at), self._modes(at):
                yield
        finally:
            for node in reversed(self._new):
                if not node.users:
                    self.graph.erase_node(node)
            self._new = []

    def call(self, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Node:
        """Inserts a call of a function, or of a method by its name.

        Raises:
            Refused: the call raises for tensors of these shapes and dtypes.
        """
        kind = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(kind, target, args, kwargs)
        self._new.append(node)
        try:
            node.meta["example_value"] = self._run(node, value)
        except Exception as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        return node

    def size(self, size: Any) -> int | Node:
        """Returns a size as an argument: a number, or a node of the graph that has this value.

        Raises:
            Refused: it depends on the inputs, and no node before the new ones has it.
        """
        if not isinstance(size, torch.SymInt):
            return int(size)
        for node in self.graph.nodes:
            if node is self._at:
                break
            found = value(node)
            if isinstance(found, torch.SymInt) and same(found, size):
                return node
            if isinstance(found, Tensor):
                for dim, length in enumerate(found.shape):
                    if isinstance(length, torch.SymInt) and same(length, size):
                        return self.call("size", node, dim)
        raise Refused(f"no node has the size {size}")

    def _run(self, node: Node, lookup: Callable[[Node], Any]) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lookup)
        from torch._dispatch.python import enable_python_dispatcher

        shape_env = self.fake_mode.shape_env
        # Sizes that depend on the data are new in each run, and nothing refers to those of this
        # run.
        ignored = (
            contextlib.nullcontext()
            if shape_env is None
            else (shape_env.ignore_fresh_unbacked_symbols())
        )
        with self.fake_mode, enable_python_dispatcher(), ignored:
            if node.op == "call_method":
                first, *rest = args
                return getattr(first, str(node.target))(*rest, **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]

    @contextlib.contextmanager
    def _modes(self, at: Node) -> Iterator[None]:
        """Enters the modes of autocast that the graph has entered before ``at``."""
        entered: dict[Node, Any] = {}
        for node in self.graph.nodes:
            if node is at:
                break
            if node.target is torch.amp.autocast_mode._enter_autocast:
                entered[node] = node.args
            elif node.target is torch.amp.autocast_mode._exit_autocast:
                entered.pop(node.args[0], None)
        with contextlib.ExitStack() as stack:
            for args in entered.values():
                stack.enter_context(torch.autocast(*args))
            yield

    # The exchange ------------------------------------------------------------------------------

    def replace(
        self,
        results: Sequence[Node],
        new: Sequence[Node],
        inner: Collection[Node],
        skipped: Collection[Node] = (),
    ) -> None:
        """Replaces nodes by new ones, and erases those that led to them.

        Args:
            results: the nodes whose values the rest of the graph uses.
            new: for each of them, the node inserted in its place.
            inner: the nodes that only serve ``results``.
            skipped: copies and views that the old nodes read, where the new ones read what these
                were made of. They stay in the graph.

        Raises:
            Refused: the graph would compute something else. The graph is then unchanged.
        """
        matched = {*results, *inner}
        _redirect(matched, inner)
        for node in inner:
            if not matched.issuperset(node.users):
                raise Refused(f"{node.name} is used elsewhere")
        self._check_between(matched, skipped)
        if any(plain(old).requires_grad for old in results):
            self._check_saved(max(matched))
        for old, now in zip(results, new, strict=True):
            self._check_same(old, now)
        for old, now in zip(results, self._laid_out(results, new), strict=True):
            self._identify(value(old), value(now))
            now.meta = {**old.meta, **now.meta}
            old.replace_all_uses_with(now)
        for node in sorted(matched, reverse=True):
            self.graph.erase_node(node)

    def _check_between(self, matched: set[Node], skipped: Collection[Node]) -> None:
        """Refuses if computing the nodes in one place differs from computing each in its own place.

        It differs if a mode changes between the first node and the last, if a tensor that one of
        them reads changes between that node and the place, or if one of them changes a tensor that
        is used elsewhere.
        """
        old = matched.union(skipped)
        node, last = min(old), max(old)
        while node is not last:
            node = node.next
            if node in old or node in self._new:
                continue
            require(not _changes_mode(node), f"{node.name} may change a mode meanwhile")
            if writes(node):
                moved = old - {each for each in old if (each < node) == (self._at < node)}
                # A copy that stays may change too; the new nodes read what it was made of.
                read = {self._storage(each) for m in moved for each in (m, *m.all_input_nodes)}
                written = self._written(node)
                require(
                    written is not None and not written & read,
                    f"{node.name} may change a tensor meanwhile",
                )
        for node in matched:
            if writes(node) and not self._writes_unseen(node):
                raise Refused(f"{node.name} changes a tensor that is used elsewhere")

    def _check_saved(self, node: Node) -> None:
        """Refuses if a later call changes what the new nodes may save for the backward.

        A sum, for instance, saves neither operand, but the operator saves both.
        """
        read = {self._storage(each) for new in self._new for each in new.all_input_nodes}
        while node.op != "output":
            node = node.next
            # A body that runs again in the backward, such as a checkpoint's, changes no tensor.
            if writes(node) and not isinstance(node.target, torch._ops.HigherOrderOperator):
                written = self._written(node)
                saved = written is None or written & read
                require(not saved, f"{node.name} may change a tensor that the backward reads")

    def _writes_unseen(self, node: Node) -> bool:
        """Returns whether nothing after a node uses what it overwrites, except through the node."""
        written = self._written(node)
        if written is None:
            return False
        for other in self.graph.nodes:
            if other is node or self._storage(other) not in written:
                continue
            if other.op in ("placeholder", "get_attr"):
                return False
            if other < node and any(user > node for user in other.users if user not in self._new):
                return False
        return True

    def _written(self, node: Node) -> set[int] | None:
        """Returns the memory that a call may change, or None if that is unknown."""
        if is_in_place(node) and node.args:
            first = node.args[0]
            found = {self._storage(first) if isinstance(first, Node) else None}
        else:
            found = {self._storage(each) for each in node.all_input_nodes}
        return None if None in found else {each for each in found if each is not None}

    def _storage(self, node: Node) -> int | None:
        """Returns an identifier of the memory of a node's tensor; views share it."""
        fake = tensor(node)
        return None if fake is None else self._memory(fake)

    def _memory(self, fake: Tensor) -> int:
        found = _address(fake)
        return self._memories.get(found, found)

    def _identify(self, before: Any, after: Any) -> None:
        """Counts the memory of a new value as that of the value that it replaces."""
        for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
            if isinstance(old, Tensor) and isinstance(new, Tensor):
                self._memories.setdefault(_address(new), self._memory(old))
        self._replaced.append((before, after))

    def _check_same(self, old: Node, now: Node) -> None:
        before, after = plain(old), plain(now)
        require(same_shape(before.shape, after.shape), f"{old.name} would have another shape")
        require(before.dtype == after.dtype, f"{old.name} would be {after.dtype}")
        require(before.device == after.device, f"{old.name} would be on {after.device}")

    # Strides -----------------------------------------------------------------------------------

    def _laid_out(self, results: Sequence[Node], new: Sequence[Node]) -> Sequence[Node]:
        """Returns the new nodes, or copies if the graph relies on the strides of the old ones."""
        other = {
            old: now
            for old, now in zip(results, new, strict=True)
            if not same_strides(value(old), value(now))
        }
        changed = {old: value(now) for old, now in other.items()}
        if self._absorbed(changed):
            for node, again in changed.items():
                if node not in other:
                    self._identify(value(node), again)
                    node.meta["example_value"] = again
            return new
        return [
            self._restrided(old, now) if old in other else now
            for old, now in zip(results, new, strict=True)
        ]

    def _restrided(self, old: Node, now: Node) -> Node:
        """Inserts a copy of ``now`` with the strides of ``old``."""
        before = value(old)
        order = sorted(range(before.dim()), key=lambda dim: _hint(before.stride(dim)), reverse=True)
        require(before.permute(order).is_contiguous(), f"the strides of {old.name} are relied on")
        copy = self.call("contiguous", self.call("permute", now, *order))
        return self.call("permute", copy, *(order.index(dim) for dim in range(len(order))))

    def _absorbed(self, changed: dict[Node, Any]) -> bool:
        """Returns whether other strides of some tensors affect only views and copies of them.

        Args:
            changed: nodes, and their values with other strides. Those that follow are added.
        """
        if not changed:
            return True
        node, shares = min(changed), False
        while node.op != "output":
            node = node.next
            if shares and writes(node):
                return False
            read = changed.keys() & set(node.all_input_nodes)
            if not read:
                continue
            if node.op not in ("call_function", "call_method") or writes(node):
                return False
            if "as_strided" in getattr(node.target, "__name__", str(node.target)):
                return False  # it reads the memory, whatever the strides are
            try:
                again = self._run(node, lambda each: changed.get(each, value(each)))
            except Exception:  # such as a view that other strides don't allow
                return False
            pairs = list(zip(tree_leaves(value(node)), tree_leaves(again), strict=True))
            if not all(_same_but_strides(x, y) for x, y in pairs):
                return False
            if not all(same_strides(x, y) for x, y in pairs if isinstance(x, Tensor)):
                changed[node] = again
            # A reshape may return a view where it returned a copy, or the opposite; then a change
            # of one tensor shows in other tensors than it did.
            shares |= any(
                self._share(value(each), value(node)) != self._share(changed[each], again)
                for each in read
            )
        return True

    def _share(self, whole: Any, part: Any) -> bool:
        """Returns whether two values have tensors in the same memory."""
        found, others = (
            {self._memory(t) for t in tree_leaves(x) if isinstance(t, Tensor)}
            for x in (whole, part)
        )
        return bool(found & others)


def _redirect(matched: set[Node], inner: Collection[Node]) -> None:
    """Makes calls that use only a tensor's dtype and device take them from an earlier tensor."""
    inputs = {each for node in matched for each in node.all_input_nodes} - matched
    for node in inner:
        for user in [each for each in node.users if each not in matched]:
            if user.op == "call_method" and user.target in _TAKES_DTYPE and user.args[0] is node:
                kind = plain(node).dtype, plain(node).device
                for other in inputs:
                    fake = tensor(other)
                    if fake is not None and other < user and (fake.dtype, fake.device) == kind:
                        user.args = (other, *user.args[1:])
                        break


_TAKES_DTYPE = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


def same_strides(a: Tensor, b: Tensor) -> bool:
    """Returns whether the strides agree in every dimension of more than one element."""
    return all(
        same(x, y) or same(size, 1)
        for x, y, size in zip(a.stride(), b.stride(), a.shape, strict=True)
    )


def _hint(size: Any) -> int:
    """Returns a size in the call that is traced."""
    hint = size.node.hint if isinstance(size, torch.SymInt) else size
    require(hint is not None, "a stride depends on the data")
    return int(hint)


def _same_but_strides(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.dtype == after.dtype and same_shape(before.shape, after.shape)
    return type(before) is type(after) and same(before, after)


def _address(fake: Tensor) -> int:
    return int(fake.untyped_storage()._cdata)


def _changes_mode(node: Node) -> bool:
    """Returns whether a call may change a mode, as some of those do that return nothing."""
    returns_nothing = node.op == "call_function" and value(node) is None and not writes(node)
    return returns_nothing and node.target not in _ONLY_CHECK


# Each nn.Module that is made in the code, such as nn.Softmax(dim=-1)(scores), calls the first.
_ONLY_CHECK = {torch._C._log_api_usage_once, torch._check, torch._assert, torch._assert_async}
