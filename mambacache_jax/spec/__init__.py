"""Speculative decoding: drafts, acceptance, and states that follow what was accepted."""

from mambacache_jax.spec.accept import Accepted as Accepted
from mambacache_jax.spec.accept import choose as choose
from mambacache_jax.spec.accept import cut as cut
from mambacache_jax.spec.accept import reject as reject
from mambacache_jax.spec.accept import walk as walk
from mambacache_jax.spec.accept import walk_typical as walk_typical
from mambacache_jax.spec.context import StateMode as StateMode
from mambacache_jax.spec.draft import DeviceDraft as DeviceDraft
from mambacache_jax.spec.mtp import MTPDraft as MTPDraft
from mambacache_jax.spec.replay import PendingReplay as PendingReplay
from mambacache_jax.spec.replay import ReplayPlan as ReplayPlan
from mambacache_jax.spec.replay import fold as fold
from mambacache_jax.spec.replay import make_pending as make_pending
from mambacache_jax.spec.replay import shorten as shorten
from mambacache_jax.spec.tree import DraftTree as DraftTree
from mambacache_jax.spec.tree import no_drafts as no_drafts
