"""Writes the fixtures of this folder: tiny random checkpoints, and what transformers computes from them.

    python make_golden.py [name ...]
    python make_golden.py --random COUNT --seed SEED --out FOLDER

The second form writes random configurations elsewhere, which `check.py` holds to their references.
Needs torch and transformers; `make golden` installs them apart and runs this. For each entry of specs.json
it builds the transformers model with weights drawn here (a wrong gate, state or multiplier then shows in the
logits, which it would not at the library's own small initial weights), rounds them to bfloat16 so that the
file can hold them as such, and evaluates the library's code in float64 on them. That is the reference.
float32 is run beside it in the library's two ways, the whole sequence at once and one token at a time; the
larger distance of the two says how far rounding alone carries.
"""

import argparse
import contextlib
import json
import math
import pathlib
import zlib

import numpy as np
import random_specs
import safetensors.torch
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent


@contextlib.contextmanager
def in_float64(model):
    """Runs the model in float64, also where its code casts to float32."""
    names = {"float32": torch.float64, "float": torch.float64}
    before = {name: getattr(torch, name) for name in names}
    to_float, default = torch.Tensor.float, torch.get_default_dtype()
    model.double()
    for name, dtype in names.items():
        setattr(torch, name, dtype)
    torch.Tensor.float = lambda tensor, *args, **kwargs: tensor.double()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        for name, dtype in before.items():
            setattr(torch, name, dtype)
        torch.Tensor.float = to_float
        torch.set_default_dtype(default)
        model.to(torch.float32)


def draw(name, parameter, tied, seed):
    """A parameter's values, from its name and the seed alone."""
    generator = torch.Generator().manual_seed((seed << 20) + (zlib.crc32(name.encode()) & 0xFFFFF))
    normal = torch.randn(parameter.shape, generator=generator)
    uniform = torch.rand(parameter.shape, generator=generator)
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "A_log":
        return torch.log(0.5 + 7.5 * uniform)
    if leaf == "dt_bias":
        step = torch.exp(math.log(0.01) + uniform * math.log(50.0))
        return step + torch.log(-torch.expm1(-step))
    if leaf == "D":
        return 1 + 0.3 * normal
    if "e_score_correction_bias" in name:
        return 0.05 * normal
    if "conv1d" in name and leaf == "weight":
        return 0.6 * normal
    if leaf == "bias":
        return 0.2 * normal
    if parameter.ndim == 1:  # norms, which start at 0 or 1
        return parameter.detach() + 0.15 * normal
    if "embed" in name:
        return normal * (1.2 / math.sqrt(parameter.shape[-1]) if tied else 1.0)
    return normal * (3.0 if "lm_head" in name else 1.4) / math.sqrt(parameter.shape[-1])


def build(spec):
    config = getattr(transformers, spec["config_class"])(**spec["config"])
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    buffers = [(n, b) for n, b in model.named_buffers() if "e_score_correction_bias" in n]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *buffers]:
            values = draw(name, parameter, config.tie_word_embeddings, spec["seed"])
            parameter.copy_(values.bfloat16().float())
    return config, model


def save(model, folder):
    """The checkpoint as transformers writes it, in bfloat16."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in safetensors.torch.load_file(path).items()}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    (folder / "generation_config.json").unlink(missing_ok=True)


@torch.no_grad()
def logits(model, ids):
    return model(torch.as_tensor(ids)[None], use_cache=False).logits[0].numpy()


def continued(model, ids, count):
    """The ids and their greedy continuation, each token from a whole forward pass."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(logits(model, ids)[-1].argmax()))
    return np.array(ids)


@torch.no_grad()
def stepped(model, ids, kept):
    """Logits computed one token at a time, and the states after the first `kept` tokens."""
    rows, cache, found = [], None, {}
    for index, token in enumerate(ids):
        position = torch.tensor([[index]])  # Bamba counts from 0 again unless it is told
        out = model(torch.tensor([[token]]), position_ids=position, cache=cache, use_cache=True)
        rows.append(out.logits[0, 0].numpy())
        cache = out.cache
        if index + 1 == kept:
            found = {key: value.copy() for key, value in states_of(cache).items()}
    return np.stack(rows), found


@torch.no_grad()
def states(model, ids):
    return states_of(model(torch.as_tensor(ids)[None], use_cache=True).cache)


def states_of(cache):
    """`conv` [channel, width] and `rec` of recurrent layers, `k` and `v` of attention."""
    found = {}
    for index, layer in enumerate(cache.layers):
        for name, kept in (("conv", "conv_states"), ("rec", "recurrent_states")):
            values = getattr(layer, kept, None)
            if values and values[0] is not None:
                found[f"state_{index}_{name}"] = values[0][0].numpy()
        for name, kept in (("k", "keys"), ("v", "values")):
            if getattr(layer, kept, None) is not None:
                found[f"state_{index}_{name}"] = getattr(layer, kept)[0].numpy()
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER)
    args = parser.parse_args()
    if args.random:
        specs = random_specs.specs(args.random, args.seed)
    else:
        specs = json.loads((FOLDER / "specs.json").read_text())
    for name, spec in specs.items():
        if args.names and name not in args.names:
            continue
        folder = args.out / name
        folder.mkdir(exist_ok=True, parents=True)
        config, model = build(spec)
        save(model, folder)
        options = {"experts_implementation": "eager"} if spec.get("experts") else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", **options
        ).eval()
        random = np.random.default_rng(spec["seed"])
        arrays, errors = {}, []
        for index, length in enumerate(spec.get("lengths", [150, 17])):
            ids = random.integers(3, config.vocab_size, length)
            with in_float64(model):
                both = continued(model, ids, 24)
                exact = logits(model, both)
                assert exact.dtype == np.float64
                if index == 0:
                    exact_states = states(model, ids)
            steps, stepped_states = stepped(model, both, length)
            errors.append(max(np.abs(rounded - exact).max() for rounded in (logits(model, both), steps)))
            top = np.sort(exact[length - 1 : -1], axis=-1)
            arrays |= {
                f"ids_{index}": both.astype(np.int32),
                f"logits_{index}": exact.astype(np.float32),
                f"margin_{index}": (top[:, -1] - top[:, -2]).astype(np.float32),
            }
            if index == 0:
                ways = (states(model, ids), stepped_states)
                for key, value in exact_states.items():
                    arrays[key] = value.astype(np.float32)
                    distances = [np.abs(way[key] - value).max() for way in ways]
                    arrays[f"error_{key}"] = np.float32(max(distances))
        arrays["lengths"] = np.array(spec.get("lengths", [150, 17]), np.int32)
        arrays["error"] = np.array(errors, np.float32)
        np.savez_compressed(folder / "golden.npz", **arrays)
        count = sum(parameter.numel() for parameter in model.parameters())
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(
            f"{name}: {count:,} parameters, {size / 1e6:.2f} MB, logits' spread {exact.std():.1f}, "
            f"float32 is off by {max(errors):.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
