"""The built-in model, loaded once, and engines of few shapes, so that programs are compiled once."""

import jax.numpy as jnp
import pytest

from mambacache_jax.config import CacheConfig, EngineConfig
from mambacache_jax.engine import Engine
from mambacache_jax.models import load


@pytest.fixture(scope="session")
def model():
    return load("tiny")


@pytest.fixture(scope="session")
def make_engine(model):
    """`make_engine(**changes)`: four rows and a budget of two blocks, or as the changes say."""
    cache_fields = CacheConfig.__dataclass_fields__

    def make(**changes):
        cache = {"num_kv_slots": 2048, "num_ssm_slots": 32, "track_interval": 16}
        config = {"max_running": 4, "max_context": 512, "token_budget": 128}
        for name, value in changes.items():
            (cache if name in cache_fields else config)[name] = value
        return Engine(model, CacheConfig(**cache), EngineConfig(**config))

    return make


@pytest.fixture
def poison():
    """`poison(engine)`: fills the null page and the null slot with NaN."""

    def fill(engine):
        page = engine.cache.config.page_size

        def change(pools):
            kv = pools.kv._replace(
                k=tuple(leaf.at[:page].set(jnp.nan) for leaf in pools.kv.k),
                v=tuple(leaf.at[:page].set(jnp.nan) for leaf in pools.kv.v),
            )
            ssm = pools.ssm._replace(
                conv=tuple(leaf.at[0].set(jnp.nan) for leaf in pools.ssm.conv),
                state=tuple(leaf.at[0].set(jnp.nan) for leaf in pools.ssm.state),
            )
            return pools._replace(kv=kv, ssm=ssm)

        engine.cache.replace_pools(change)

    return fill
