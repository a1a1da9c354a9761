"""Chat templates: messages to the text of a prompt, in the Jinja environment that transformers gives them."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class ChatTemplate:
    """One template. It runs sandboxed: it can read what it is given, and change or import nothing."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Parses a template.

        Args:
          source: Jinja.
          special_tokens: variables such as `bos_token`.

        Raises:
          ValueError: it does not parse.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"The chat template does not parse: line {error.lineno}: {error}.") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
          messages: mappings with `role` and `content`.
          add_generation_prompt: end with what begins the model's answer.
          **variables: what else the template may read, such as `tools`.

        Raises:
          ValueError: the template refuses the messages or does what the sandbox forbids.
        """
        variables = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"The chat template refuses the messages: {error}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model has said; it reads as what is inside."""

    tags = {"generation"}  # noqa: RUF012  (declared so by the base class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, **options: Any) -> str:
    """JSON as it is, where Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=False, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
