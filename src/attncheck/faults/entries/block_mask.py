"""Faults: lists of tiles that a mask leaves empty, partial or full."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

_IDEAL = "subjects.ideal_attention"
_SEEN = "        seen = self.visible(self.mask, at) & inside\n        return seen.expand("
_WHOLE = "(problem.batch, problem.heads, len(row), len(key))"
_VISITED = """            seen, at = self.seen(rows, keys)
            if bool(seen.any()):
                s = self.modified("""

FAULTS = (
    Fault(
        id="blockmask-partial-as-full",
        category="block mask",
        summary="a tile of which more than half is visible counts as full: its mask is not applied",
        when="tiles with a few hidden places",
        seen="hidden keys count",
        sources=("pytorch/pytorch#143534", "pytorch/pytorch#141126"),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_IDEAL,
                        old=_SEEN,
                        new=f"""        seen = (self.visible(self.mask, at) & inside).expand{_WHOLE}
        tiles = seen.unflatten(2, (-1, self.tile.block_query))
        full = tiles.double().mean((-2, -1), keepdim=True) > 0.5
        seen = (tiles | full).flatten(2, 3)
        return seen.expand(""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="mods.block_mask",
                        old="+ pad(every, beyond).view(shape).amin(-1)",
                        new="+ (pad(every, beyond).view(shape).double().mean(-1) > 0.5).byte()",
                    ),
                ),
            ),
        },
        named=("tile-mostly-seen-as-full", "mask-one-key-wider", "tail-unmasked"),
    ),
    Fault(
        id="blockmask-wrong-block-size",
        category="block mask",
        summary="the list is of tiles twice as wide as those that the kernel walks over",
        when="a mask that hides something, and several tiles of keys",
        seen="listed tiles are taken for others; the later half of the keys is never visited",
        sources=(
            "kuleshov-group/bd3lms#23",
            "pytorch/pytorch#182593",
            "pytorch/pytorch#133562",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_IDEAL,
                        old=_VISITED,
                        new="""            seen, at = self.seen(rows, keys)
            listed = self.problem.mask == library.FULL
            listed |= bool(self.seen(rows, slice(2 * keys.start, 2 * keys.stop))[0].any())
            if listed and bool(seen.any()):
                s = self.modified(""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="subjects.visits",
                        old="        block_kv=block_kv,\n        device=device,",
                        new="        block_kv=block_kv if by_keys else 2 * block_kv,\n"
                        "        device=device,",
                    ),
                ),
            ),
        },
        # The later half that is never visited is the last of two splits, too.
        named=("last-tile-dropped", "tile-skipped", "split-dropped"),
    ),
    Fault(
        id="blockmask-larger-than-seq",
        category="block mask",
        summary="a list made for a longer sequence is used, and nobody looks at its length",
        when="lengths that end within a tile that is full in the longer sequence",
        seen="what lies behind the last key counts",
        sources=(
            "pytorch/pytorch#136232",
            "pytorch/pytorch#141625",
            "meta-pytorch/attention-gym#31",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_IDEAL,
                        old=_SEEN,
                        new=f"""        seen = self.visible(self.mask, at).expand{_WHOLE}
        tiles = seen.unflatten(2, (-1, self.tile.block_query))
        full = tiles.all(-1, keepdim=True).all(-2, keepdim=True)
        full = full & (self.problem.mask != library.FULL)
        seen = (tiles & (inside[:, :, None] | full)).flatten(2, 3)
        return seen.expand(""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="subjects.visits",
                        old="        problem.mask_mod(device),\n        problem.dimensions,\n",
                        new="""\
        (longer := _longer(problem, block_query, block_kv)).mask_mod(device),
        longer.dimensions,
""",
                    ),
                    Edit(
                        module="subjects.visits",
                        old="_kept = lru_cache(maxsize=_KEPT)(_visits)",
                        new="""def _longer(problem, block_query, block_kv):
    plain = {"causal", "sliding_window", "prefix_lm", "padding", "and", "or", "not"}
    if any(part.name not in plain for part in problem.mask.walk()):
        return problem
    rows, keys = -problem.query % block_query, -problem.kv % block_kv
    return problem.replace(query=problem.query + rows, kv=problem.kv + keys)


_kept = lru_cache(maxsize=_KEPT)(_visits)""",
                    ),
                ),
            ),
        },
        named=("full-tile-beyond-the-end", "tail-unmasked"),
    ),
)
