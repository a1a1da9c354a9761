"""Where a prompt is cut into blocks, and at which positions its state is exported."""

from collections.abc import Iterable

from mambacache_jax.layout import MAX_EXPORTS


def page_floor(position: int, page_size: int) -> int:
    """The last page boundary at or before `position`."""
    return position - position % page_size


def num_pages(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens fill, the last one perhaps in part."""
    return -(-num_tokens // page_size)


def export_positions(
    start: int,
    end: int,
    *,
    branches: Iterable[int],
    prompt_len: int,
    interval: int,
    page_size: int,
) -> tuple[list[int], int]:
    """Positions in `(start, end]` at which a chunk exports its state, ascending, and how many were dropped.

    Wanted are, best first: the furthest position where another prompt leaves this one, the prompt's length
    minus one (so that the same prompt sent again hits with one token left to compute), other such positions,
    furthest first, then the chunk's last multiple of `interval`. A row exports at most
    `layout.MAX_EXPORTS` states a step.

    Args:
      start: tokens already computed.
      end: tokens computed after the chunk.
      branches: positions wanted by others; each is rounded down to a page.
      prompt_len: length of the request's prompt.
      interval: `CacheConfig.checkpoint_interval`; 0 for none.
      page_size: slots a page; every result is a multiple of it.
    """
    here = sorted((b for b in branches if start < page_floor(b, page_size) <= end), reverse=True)
    wanted = [*here[:1], prompt_len - 1, *here[1:]]
    if interval:
        wanted.append(end - end % interval)
    floors = (page_floor(position, page_size) for position in wanted)
    inside = list(dict.fromkeys(position for position in floors if start < position <= end))
    return sorted(inside[:MAX_EXPORTS]), max(0, len(inside) - MAX_EXPORTS)


def num_blocks(num_tokens: int, block_tokens: int) -> int:
    """Blocks that a chunk of `num_tokens` fills, the last one perhaps in part."""
    return -(-num_tokens // block_tokens)
