"""The tree can be read as text, and written as plain data."""

import json

from mambacache_jax.host import Namespace


def test_the_tree_can_be_read(toy):
    toy.put("ABCD")
    toy.put("ABXY")
    lease = toy.cache.lock(toy.put("AB", checkpoint=False, namespace="tenant"))
    assert toy.cache.render(lambda tokens: "".join(map(chr, tokens))).splitlines() == [
        "root",
        "└── [AB] to 2: kv 1..2, tombstone",
        "    ├── [CD] to 4: kv 3..4, ssm 1",
        "    └── [XY] to 4: kv 7..8, ssm 2",
        "root 'tenant'",
        "└── [AB] to 2: kv 5..6, tombstone, held 1, ssm lock 1",
    ]
    assert toy.cache.render().splitlines()[2] == "    ├── [67 68] to 4: kv 3..4, ssm 1"
    toy.cache.unlock(lease)
    toy.put("ABCDEFGHIJKL")
    assert "[69 70 71 72 73 74 75 76] to 12" in toy.cache.render()
    toy.put("Z" * 9)
    assert "[90 90 90 90 90 90 90 90 … 9 tokens] to 9" in toy.cache.render()


def test_the_tree_can_be_written_as_json(toy):
    toy.put("ABCD")
    toy.put("ABXY", checkpoint=False)
    toy.put("A", namespace=Namespace("tenant", version=1))
    plain, tenant = json.loads(json.dumps(toy.cache.to_dict()))["roots"]
    assert (plain["namespace"], tenant["namespace"]) == (
        None,
        "Namespace(adapter='tenant', salt=None, version=1)",
    )
    (upper,) = plain["children"]
    assert (upper["tokens"], upper["position"], upper["checkpoint_slot"]) == ([65, 66], 2, 0)
    assert [child["tokens"] for child in upper["children"]] == [[67, 68], [88, 89]]
    assert [child["checkpoint_slot"] for child in upper["children"]] == [1, 0]
    assert (upper["kv_slots"], upper["held"], upper["ssm_lock"]) == ([1, 2], 0, 0)
