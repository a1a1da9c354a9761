"""Holds checkpoints that `make_golden.py --random` wrote to their references: `python check.py FOLDER`."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from mambacache_jax.models import PlainContext, load


def distance(folder):
    """The largest distance of a logit from the reference, and the bound that `test_golden.py` sets."""
    model, arrays = load(folder), np.load(folder / "golden.npz")

    @jax.jit
    def forward(params, tokens):
        return model.logits(params, model.hidden(params, tokens, PlainContext(model.specs, 1, len(tokens))))

    logits = forward(model.params, jnp.asarray(arrays["ids_0"]))
    return np.abs(np.asarray(logits) - arrays["logits_0"]).max(), max(4 * arrays["error"][0], 2e-4)


def main():
    failed = 0
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*/golden.npz")):
        off, bound = distance(path.parent)
        failed += not off <= bound
        print(
            f"{path.parent.name:20} off by {off:.1e}, at most {bound:.1e}{'' if off <= bound else '  FAILED'}"
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
