"""`hqsweep recipe`: list, show, compare, export and import recipes. NAME is a recipe of the package or of ./conf, a
file, or a bare format."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hqsweep.cli import completion as cli_completion
from hqsweep.cli.output import AsJson, OneSentence, Shown, print_result, result_console, say

app = typer.Typer(cls=OneSentence, no_args_is_help=True, help="List, show, compare, export and import recipes.")

_COMPLETED = {"autocompletion": cli_completion.recipe_name}
Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A packaged recipe, one of ./conf, PATH.yaml, or format:NAME.", **_COMPLETED),
]
ConfigDir = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, help="Your configs; ./conf is searched in any case.")
]
All = Annotated[bool, typer.Option("--all", help="One line for each slot, also where slots are alike.")]
SLOT_COLUMNS = {
    "slot": "slot", "rowwise": "rowwise", "rowwise_reads": "read by", "columnwise": "columnwise",
    "columnwise_reads": "read by", "columnwise_source": "columnwise from",
}  # fmt: skip
FOLDED_COLUMNS = {
    "slot": "slots",
    "rowwise": "rowwise",
    "columnwise": "columnwise",
    "columnwise_source": "columnwise from",
}
DIFF_COLUMNS = {"slot": "slot", "field": "what", "a": "A", "b": "B"}
INDENT = 4
"""Spaces before the parts of a recipe where they stand below its name."""


@app.command()
def ls(config_dir: ConfigDir = None, as_json: AsJson = False) -> None:
    """List the recipes that recipe= and Python take, with what tells them apart.

    That is the quantizers of linears, and of other parts where these differ from them. What is wrong in one is said
    beside the others, and the exit code is 3.
    """
    from hqsweep.errors import EXIT_FAILED, UserError
    from hqsweep.recipe.base import AnyRecipe
    from hqsweep.recipe.listing import parts, slots
    from hqsweep.sweep.grid.compose import known_recipes, recipe_composer

    rows, faults, composer = [], [], recipe_composer(config_dir)
    recipes: dict[str, AnyRecipe] = {}
    for name in known_recipes(config_dir):
        try:
            recipe = _load(name, config_dir, composer)
        except UserError as fault:
            faults.append(str(fault))
            continue
        linear = [slot for slot in slots(recipe) if slot.part == "linear" and slot.stage == 0]
        row = {"name": name, "input": str(getattr(recipe, "qfactory", "-")), "weight": None, "grad_output": None}
        row |= {slot.tensor: str(slot.quantizer) for slot in linear}
        same = next((other for other, known in recipes.items() if known == recipe), None)
        rows.append(row | {"parts": parts(recipe), "same_as": same})
        recipes[name] = recipe
    print_result(as_json, rows, f"{len(rows)} recipes", _listed(rows, result_console().width))
    for fault in faults:
        say(fault, err=True)
    if faults:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def show(name: Name, every: All = False, config_dir: ConfigDir = None, as_json: AsJson = False) -> None:
    """Show what a recipe does to each tensor, in both directions.

    Overrides and schedule included; with --all also which GEMM reads it. gemms is the same by products, where every
    columnwise operand is made from the original tensor: formats of fprop/dgrad/wgrad, as recipe.linear.gemms takes.
    """
    from hqsweep.recipe.argument import recipe_config
    from hqsweep.recipe.listing import ALL_FIELDS, PROJECTION, by_gemms, folded, slots

    recipe = _load(name, config_dir)
    config, rows, gemms = recipe_config(recipe), [slot.row() for slot in slots(recipe)], by_gemms(recipe)
    notes = [f"{part}.gemms: {text}" for part, text in gemms.items()]
    notes += [f"gemm: {recipe.gemm}"]
    notes += [f"comm: {comm}"] if (comm := getattr(recipe, "comm", None)) else []
    notes += [f"overrides[{i}] is for {o}" for i, o in enumerate(getattr(recipe, "overrides", ()))]
    notes += [f"schedule[{i}] comes {change.when}" for i, change in enumerate(recipe.schedule)]
    if "qfactory" in config:
        notes += [f"the quantizers come from {recipe.qfactory}", f"fp8_dpa: {recipe.fp8_dpa}"]
    projected = {PROJECTION: "projected to"} if any(row[PROJECTION] for row in rows) else {}
    if every:
        table = _table(name, rows, SLOT_COLUMNS | projected)
    else:
        table = _table(name, folded(rows, ALL_FIELDS, [row["slot"] for row in rows]), FOLDED_COLUMNS | projected)
    print_result(as_json, {"name": name, "recipe": config, "slots": rows, "gemms": gemms}, table, *notes)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A recipe, as NAME of show.", **_COMPLETED)],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.", **_COMPLETED)],
    every: All = False,
    config_dir: ConfigDir = None,
    as_json: AsJson = False,
) -> None:
    """Say where two recipes differ: slots by value, overrides, schedule, GEMM mode.

    Names are labels and do not count.
    """
    from hqsweep.recipe.listing import diff as differences
    from hqsweep.recipe.listing import folded, of_both_directions, slots

    one, other = (_load(name, config_dir) for name in (a, b))
    rows, names = differences(one, other), [slot.name for recipe in (one, other) for slot in slots(recipe)]
    lines = rows if every else folded(of_both_directions(rows), ("field", "a", "b"), names)
    shown = _table(f"{a} against {b}", lines, DIFF_COLUMNS | {"a": a, "b": b}) if rows else f"{a} and {b} are equal"
    print_result(as_json, rows, shown)


@app.command()
def export(
    name: Name,
    to: Annotated[Literal["transformer-engine", "json"], typer.Option(help="What is written.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there, not to stdout.")] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the model, for overrides that count them.")
    ] = None,
    config_dir: ConfigDir = None,
) -> None:
    """Write a recipe as a Python module for TransformerEngine, or as JSON."""
    import json

    from hqsweep.compat.export import to_transformer_engine
    from hqsweep.errors import UserError
    from hqsweep.recipe.argument import recipe_config

    recipe = _load(name, config_dir)
    if to == "json":
        text = json.dumps({"name": Path(name).stem} | recipe_config(recipe), indent=2)
    else:
        text = to_transformer_engine(recipe, Path(name).stem, layers).rstrip()
    if out is None:
        typer.echo(text)
        return
    try:
        out.write_text(text + "\n")
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; give a file in a folder that exists") from None
    say(f"wrote {out}", err=True)


@app.command("import")
def import_(
    factory: Annotated[
        str, typer.Argument(metavar="FILE.py:NAME", help="A factory, or a recipe, for TransformerEngine.")
    ],
    out: Annotated[Path | None, typer.Option(metavar="RECIPE.yaml", help="Write the recipe there.")] = None,
    as_json: AsJson = False,
) -> None:
    """Turn a quantizer factory that was written for TransformerEngine into a recipe. The file's code runs.

    Attention is read from a CustomRecipe with fp8_dpa=True.
    """
    import yaml

    from hqsweep.compat.recipe_import import from_transformer_engine
    from hqsweep.errors import UserError

    path, _, name = factory.rpartition(":")
    if not path:
        raise UserError(f"'{factory}' names no factory; give FILE.py:NAME, such as factories.py:qfactory")
    if out and out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {out}: a recipe's file must end in .yaml or .yml, or recipe=PATH does not take it")
    config = from_transformer_engine(Path(path), name)
    named = {"name": out.stem if out else name} | config
    text = yaml.safe_dump(named, sort_keys=False)
    if out is None:
        print_result(as_json, named, text.rstrip())
        return
    try:
        out.write_text(text)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; give a file in a folder that exists") from None
    print_result(as_json, named, f"wrote {out}; run it as recipe={out}")


def _load(name: str, config_dir: Path | None, composer: Any = None) -> Any:
    """The recipe, unless `run` would refuse it or its name. composer: as load_recipe takes it."""
    from pydantic import ValidationError

    from hqsweep.config.job import RecipeConfig
    from hqsweep.config.section import sentence
    from hqsweep.errors import UserError
    from hqsweep.recipe.argument import parse_recipe
    from hqsweep.recipe.factories import factory_name
    from hqsweep.sweep.grid.compose import load_recipe

    try:
        config = load_recipe(name, config_dir, composer)
        recipe = parse_recipe(config, factory_name)
        RecipeConfig.model_validate({"name": Path(name).stem} | config)
    except ValidationError as error:
        raise UserError(f"recipe '{name}': recipe.{sentence(error, RecipeConfig)}") from None
    except UserError as error:
        raise UserError(str(error) if f"'{name}'" in str(error) else f"recipe '{name}': {error}") from None
    return recipe


def _listed(rows: list[dict[str, Any]], width: int) -> str:
    """Recipes with their parts, beside the names where there is room, else below them. Lines break between words, a
    tensor stays with its quantizer where a line has room for both, and a longer word stays whole."""
    from textwrap import wrap

    texts = {
        row["name"]: [f"as {row['same_as']}"] if row["same_as"] else [f"{k}: {v}" for k, v in row["parts"].items()]
        for row in rows
    }
    column = max(map(len, texts), default=0) + 2
    longest = max((len(item) for parts in texts.values() for part in parts for item in part.split(", ")), default=0)
    indent = column if width >= column + longest + 3 else INDENT
    space = "\u00a0" if width >= indent + longest + 3 else " "
    lines = []
    for name, parts in texts.items():
        told = [
            line.replace("\u00a0", " ")
            for part in parts
            for line in wrap(
                ", ".join(item.replace(" ", space) for item in part.split(", ")),
                width,
                initial_indent=" " * indent,
                subsequent_indent=" " * (indent + 2),
                break_long_words=False,
                break_on_hyphens=False,
            )
        ]
        lines += [name.ljust(column) + told[0][column:], *told[1:]] if indent == column else [name, *told]
    return "\n".join(lines)


def _table(heading: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> Shown:
    from hqsweep.report.pages.text import TextTable, text, to_rich

    def cell(value: Any) -> str:
        return " ".join(value) or "-" if isinstance(value, list) else text(value)

    cells = tuple(tuple(cell(row[key]) for key in columns) for row in rows)
    return to_rich(TextTable(header=tuple(columns.values()), rows=cells), heading)
