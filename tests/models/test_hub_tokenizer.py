"""A folder's tokenizer streams whole characters, and its chat template runs sandboxed."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mambacache_jax.models import ChatTemplate, HubTokenizer, TextStream, Tokenizer
from mambacache_jax.models.tokenizer import NoTokenizer

TEXT = "def main():\n    print('Grüße, 世界 🌍')\n"
TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
    {% if message.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}
[{{ message.role }}]{% generation %}{{ message.content | trim }}{% endgeneration %}

{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE, trained here, with special tokens and a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([TEXT] * 3, trainer)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
    )
    bpe.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return HubTokenizer(folder)


def test_ids_begin_with_the_special_token_and_decode_without_it(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert isinstance(tokenizer, Tokenizer)
    assert ids.dtype == np.int32
    assert ids[0] == 0
    assert ids.tolist() == [0, *tokenizer.encode(TEXT, special_tokens=False)]
    assert tokenizer.decode(ids) == TEXT


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 280), max_size=20), steps=st.lists(st.integers(1, 4), min_size=20))
def test_a_stream_gives_the_text_of_all_ids_in_whole_characters(tokenizer, ids, steps):
    stream, text, left = tokenizer.stream(), "", list(ids)
    assert isinstance(stream, TextStream)
    for step in steps:
        if not left:
            break
        piece = stream.push(left[:step])
        left = left[step:]
        assert not piece.endswith("\ufffd")
        text += piece
    assert text + stream.flush() == tokenizer.decode(ids)


def test_a_character_of_several_tokens_comes_when_it_is_whole(tokenizer):
    stream = tokenizer.stream()
    ids = tokenizer.encode("é🐍", special_tokens=False)
    assert len(ids) > 3
    pieces = [stream.push([token]) for token in ids.tolist()]
    assert [piece for piece in pieces if piece] == ["é", "🐍"]


def test_a_conversation_is_rendered_as_transformers_would(tokenizer):
    messages = [{"role": "user", "content": " <Hi> "}, {"role": "assistant", "content": "Yo"}]
    text = tokenizer.chat_template.render(messages, tools=[{"name": "größe"}])
    assert text == '<s>[user]<Hi>\n[assistant]Yo\n[{"name": "größe"}][assistant]'
    ids = tokenizer.encode_chat(messages)
    assert ids.tolist().count(0) == 1
    assert tokenizer.decode(ids) == "[user]<Hi>\n[assistant]Yo\n[assistant]"


def test_what_a_template_raises_is_a_value_error(tokenizer):
    with pytest.raises(ValueError, match="no system messages"):
        tokenizer.encode_chat([{"role": "system", "content": ""}])
    with pytest.raises(ValueError, match="line 1"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize("source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"])
def test_a_template_can_change_nothing_and_reach_nothing(source):
    with pytest.raises(ValueError, match=r"unsafe|not safely callable"):
        ChatTemplate(source).render([{"role": "user", "content": ""}])


def test_the_template_of_its_own_file_comes_first(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert HubTokenizer(tmp_path).chat_template.render([{"role": "user", "content": "Hi"}]) == "Hi!"


def test_without_a_chat_template_messages_are_refused(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    tokenizer = HubTokenizer(tmp_path)
    assert tokenizer.encode("a", special_tokens=False).size == 1
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": ""}])


def test_without_a_tokenizer_texts_are_refused_and_ids_show_no_text():
    none = NoTokenizer("folder")
    with pytest.raises(ValueError, match=r"folder has no tokenizer\.json"):
        none.encode("text")
    assert (none.decode([1]), none.stream().push([1]), none.stream().flush()) == ("", "", "")
