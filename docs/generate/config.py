"""docs/reference/config.md: every key of the typed configs, the packaged sweeps and what each group offers.

Types, limits and defaults come from the models; what a key means, from the comment beside it in conf.
"""

import inspect
import re
import types
import typing
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.generate.source import table
from hqsweep.cli.candidates import groups, names
from hqsweep.config.job import config_class
from hqsweep.config.jobs import JOBS
from hqsweep.config.keys import Job
from hqsweep.config.section import sections
from hqsweep.config.study import StudyConfig

HEADER = ("key", "type", "default", "what it is")
CONF = files("hqsweep") / "conf"
TYPES = {int: "integer", float: "number", str: "text", bool: "true or false", types.NoneType: "null"}
LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_LINE = re.compile(r"( *)([\w]+):([^#]*)(?:# *(.*))?$")


def page() -> str:
    parts = [
        "# Configs\n",
        "Every key is set as `KEY=VALUE` after `conf=NAME`; `KEY=V1,V2` and `KEY=range(1,4)` sweep it.",
    ]
    parts += ["\n## Sweeps and groups\n", table(("word", "what it is"), _offers())]
    parts += ["## Keys of all jobs\n", *_job(Job, Job.model_fields)]
    parts += ["## Keys of a sweep of convergence\n", inspect.getdoc(StudyConfig), "", *_study()]
    for job in JOBS:
        model = config_class(job)
        parts += [f"## Job {job}\n", inspect.getdoc(model), ""]
        others = (*Job.model_fields, *StudyConfig.model_fields)
        parts += _job(model, [name for name in model.model_fields if name not in others])
    return "\n".join(parts)


def _job(model: type[BaseModel], own: Iterable[str]) -> list[str]:
    """A table of the keys at the top level, and a heading and a table for each section."""
    fields = {name: model.model_fields[name] for name in own}
    top = [_row(name, field, {}) for name, field in fields.items() if not _section(field)]
    parts = [table(HEADER, top)]
    for name, field in fields.items():
        for tag, section in sections(field.annotation).items():
            comments = [pair for path in sorted((CONF / name).glob("*.yaml")) for pair in _comments(path).items()]
            parts += [f"### {name}{f' ({name}={tag})' if tag else ''}\n", inspect.getdoc(section), ""]
            parts += [table(HEADER, _rows(name, section, dict(comments)))]
    return parts


def _study() -> list[str]:
    """The keys of a sweep as a whole, with the comments of the YAML files that have all of them."""
    comments, rows = {}, []
    for conf in ("factorial", "fork", "convergence"):
        comments |= _comments(CONF / f"{conf}.yaml")
    for name, field in StudyConfig.model_fields.items():
        found = _rows(name, _section(field), {}) if _section(field) else [_row(name, field, {})]
        rows += [(*row[:3], comments.get(row[0], "")) for row in found]
    return [table(HEADER, rows)]


def _rows(prefix: str, section: type[BaseModel], comments: dict[str, str]) -> list[tuple[str, ...]]:
    rows = []
    for name, inner in section.model_fields.items():
        key = f"{prefix}.{name}"
        named = any(typing.get_origin(held) is typing.Literal for held in _held(inner))  # a name, or a section
        rows += [_row(key, inner, comments)] if named or not _section(inner) else []
        rows += _rows(key, _section(inner), comments) if _section(inner) else []
    return rows


def _row(key: str, field: FieldInfo, comments: dict[str, str]) -> tuple[str, str, str, str]:
    limits = [
        f"{sign} {getattr(m, name):g}"
        for m in _metadata(field)
        for name, sign in LIMITS.items()
        if getattr(m, name, None) is not None
    ]
    default = (
        "required"
        if field.is_required()
        else "null"
        if field.default is None
        else str(field.get_default(call_default_factory=True)).replace("False", "false").replace("True", "true")
    )
    return (
        key,
        " ".join([_type(field.annotation), " and ".join(limits)]).strip(),
        default,
        comments.get(key.partition(".")[2], ""),
    )


def _metadata(field: FieldInfo) -> Iterator[object]:
    """Limits of the field, and of what a union such as `Count | None` holds."""
    for one in [
        *field.metadata,
        *(m for a in typing.get_args(field.annotation) for m in getattr(a, "__metadata__", ())),
    ]:
        yield from getattr(one, "metadata", [one])


def _type(annotation: typing.Any) -> str:
    if typing.get_origin(annotation) is typing.Annotated:
        return _type(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(map(str, typing.get_args(annotation)))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_type(each) for each in typing.get_args(annotation))
    if typing.get_origin(annotation) is list:
        return f"list of {_type(typing.get_args(annotation)[0])}"
    return TYPES.get(annotation, "mapping")


def _held(field: FieldInfo) -> list[object]:
    """What a union holds, without marks."""
    options = [getattr(option, "__origin__", option) for option in typing.get_args(field.annotation)]
    return options if _section(field) else []


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a key holds, always or where it is not null; the first where it may be of several classes."""
    return next(iter(sections(field.annotation).values()), None)


def _offers() -> list[tuple[str, str]]:
    """conf=NAME, recipe=NAME and so on, with the comment at the top of each file."""
    rows = []
    for group in ("", *groups([CONF])):
        for name in names(group, [CONF]):
            lines = (CONF / group / f"{name}.yaml").read_text().splitlines()
            first = list(_leading(lines))
            rows.append((f"{group or 'conf'}={name}", " ".join(first)))
    return rows


def _leading(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("#"):
            return
        yield line.lstrip("# ")


def _comments(path: Path) -> dict[str, str]:
    """Dotted key -> the comment on its line."""
    found, parents = {}, []
    for line in filter(None, map(_LINE.match, path.read_text().splitlines())):
        indent, key, _, comment = line.groups()
        parents = [*parents[: len(indent) // 2], key]
        if comment:
            found[".".join(parents)] = comment
    return found
