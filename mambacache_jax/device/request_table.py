"""The request table: where each running request's KV lies, and the token it sampled last.

Row 0 is the null row: padding reads and writes it, and no request has it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


class RequestTable(NamedTuple):
    """One row a running request.

    Attributes:
      pages: KV page by page position; page 0 is the null page. Entries past a request's length are stale.
      last_token: the token that the row sampled last, which the next step feeds.
    """

    pages: Int32[Array, "row page"]
    last_token: Int32[Array, " row"]


def make_request_table(num_rows: int, num_pages: int) -> RequestTable:
    """A zeroed table; `num_rows` includes the null row, `num_pages` is the most pages of one request."""
    return RequestTable(
        pages=jnp.zeros((num_rows, num_pages), jnp.int32), last_token=jnp.zeros((num_rows,), jnp.int32)
    )


def set_page(
    table: RequestTable,
    rows: Int32[Array, " entry"],
    index: Int32[Array, " entry"],
    pages: Int32[Array, " entry"],
) -> RequestTable:
    """Writes `pages[i]` at `[rows[i], index[i]]`; unused entries name the null row."""
    return table._replace(pages=table.pages.at[rows, index].set(pages, mode="promise_in_bounds"))


def set_blocks(
    table: RequestTable,
    rows: Int32[Array, " update"],
    blocks: Int32[Array, " update"],
    pages: Int32[Array, "update entry"],
) -> RequestTable:
    """Writes the aligned run `blocks[i]` of row `rows[i]`; unused updates name the null row."""
    runs = table.pages.reshape(table.pages.shape[0], -1, pages.shape[1])
    runs = runs.at[rows, blocks].set(pages, mode="promise_in_bounds")
    return table._replace(pages=runs.reshape(table.pages.shape))


def slots_of(
    table: RequestTable, rows: Int32[Array, " *token"], positions: Int32[Array, " *token"], page_size: int
) -> Int32[Array, " *token"]:
    """The KV slot of each (row, position)."""
    pages = table.pages.at[rows, positions // page_size].get(mode="promise_in_bounds")
    return pages * page_size + positions % page_size
