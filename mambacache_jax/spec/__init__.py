"""Speculative decoding: drafts, acceptance, and states that follow what was accepted."""

from mambacache_jax.spec.accept import Accepted as Accepted
from mambacache_jax.spec.accept import choose as choose
from mambacache_jax.spec.accept import cut as cut
from mambacache_jax.spec.accept import reject as reject
from mambacache_jax.spec.accept import walk as walk
from mambacache_jax.spec.accept import walk_typical as walk_typical
from mambacache_jax.spec.tree import DraftTree as DraftTree
from mambacache_jax.spec.tree import no_drafts as no_drafts
