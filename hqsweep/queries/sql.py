"""Queries in SQL over tables of runs, by duckdb.

    arm, seed, min(val_loss) where step > 100                     the short form: columns and what follows them
    select arm, avg(val_loss) as loss from runs order by loss     a whole select

The short form takes its table from the columns that it names. Plain columns beside aggregates are the groups. The SQL
sees the tables of the runs, and nothing else: duckdb opens no file, no network and no extension, takes no setting, and
reads no variable of Python; a select is the only statement.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from hqsweep.config.safe import loads
from hqsweep.errors import UserError, nearest
from hqsweep.host import usable_cpus
from hqsweep.queries.held import table_of
from hqsweep.queries.index import FACTS, NAMES, PLACE, Tables

EXAMPLE = "as in: arm, seed, min(val_loss) where step > 100"
CONDITION = "write as in: --where \"state = 'failed'\" --sort=-loss"
SHOWN = 12
"""The number of columns that an error names."""
BEGINNINGS = ("select", "from", "with", "values", "(")


def ask(question: str, tables: Tables) -> pa.Table:
    """The answer to a question about `tables`. Raises UserError for SQL that is wrong, in one sentence."""
    words = question.strip().rstrip(";").strip()
    if not words:
        raise UserError(f"query: there is no question; name columns, {EXAMPLE}")
    con = _connection()
    tree = _parsed(con, words if words.lower().startswith(BEGINNINGS) else f"SELECT {words}")
    columns = _Columns(tree, tables)
    columns.give_table(tree)
    columns.join_dotted_names()
    for table in columns.tables:
        _register(con, table, tables, columns.needed(table))
    is_grouped = _group(con, tree)
    sql = _text(con, tree)
    return _run(con, f"SELECT * FROM ({sql}) ORDER BY ALL" if is_grouped else sql, columns)


def chosen(rows: Sequence[Mapping[str, Any]], where: str | None, sort: str | None, option: str) -> list[int]:
    """The numbers of the rows for which `where` holds, in the order of `sort`: columns with commas between them, the
    highest first for one with a minus before it. Raises UserError; `option` begins its sentence."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not rows or not (where or sort):
        return list(range(len(rows)))
    plain = [{name: _scalar(value) for name, value in row.items()} for row in rows]
    con = _connection()
    con.register("listed", table_of(plain).append_column(PLACE, pa.array(range(len(rows)))))
    keys = [key.strip() for key in (sort or "").split(",") if key.strip()]
    order = [f"({_of_key(key)}) {'DESC' if key.startswith('-') else 'ASC'} NULLS LAST" for key in keys]
    sql = f'SELECT "{PLACE}" FROM listed WHERE ({where or "true"}\n) ORDER BY {", ".join([*order, _quoted(PLACE)])}'
    tree = _parsed(con, sql, option)
    _forbid_tables(tree, {"listed"}, option)
    columns = _Columns(tree, None, {"listed": names}, option)
    columns.join_dotted_names()
    sql = _text(con, tree)
    return _run(con, sql, columns).column(0).to_pylist()


def _of_key(key: str) -> str:
    name = key.removeprefix("-").strip()
    return _quoted(name) if re.fullmatch(r"[\w.]+", name) else name


def _quoted(name: str) -> str:
    """A name as SQL writes it."""
    return f'"{name.replace(chr(34), 2 * chr(34))}"'


def _scalar(value: Any) -> Any:
    """A value as a cell: of a list its words, of a mapping its JSON."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else value


def _connection() -> Any:
    try:
        import duckdb
    except ModuleNotFoundError:
        raise UserError("query: duckdb is not installed; `pip install duckdb` adds it") from None
    options = {
        "threads": max(1, min(4, usable_cpus())), "autoinstall_known_extensions": False,
        "autoload_known_extensions": False, "python_enable_replacements": False, "temp_directory": "",
    }  # fmt: skip
    con = duckdb.connect(":memory:", config=options)
    con.execute("SET enable_external_access = false; SET lock_configuration = true")
    return con


def _parsed(con: Any, sql: str, option: str = "query") -> dict[str, Any]:
    """The syntax tree of one select."""
    tree = loads(con.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()[0][0])
    example = f"write columns and conditions, {EXAMPLE}" if option == "query" else CONDITION
    if tree["error"] and tree["error_type"] == "parser":
        raise UserError(f"{option}: {_first_line(tree['error_message'])}; {example}")
    if tree["error"] or len(tree["statements"]) != 1:
        raise UserError(f"{option}: one select is taken, and no other statement; {example}")
    return tree


def _text(con: Any, tree: Mapping[str, Any]) -> str:
    """The SQL of a syntax tree."""
    return con.execute("SELECT json_deserialize_sql(?)", [json.dumps(tree)]).fetchall()[0][0]


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Every mapping of a syntax tree."""
    if isinstance(tree, dict):
        yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _nodes(part)


def _forbid_tables(tree: Any, allowed: set[str], option: str) -> None:
    nodes = list(_nodes(tree))
    others = [node for node in nodes if node.get("type") in ("BASE_TABLE", "TABLE_FUNCTION", "SET_OPERATION_NODE")]
    for node in others:
        if node.get("table_name") not in allowed:
            raise UserError(f"{option}: a condition on the columns is taken, and no other table; {CONDITION}")


class _Columns:
    """The columns and tables that a syntax tree names."""

    def __init__(
        self, tree: Any, tables: Tables | None, listed: Mapping[str, list[str]] | None = None, option: str = "query"
    ) -> None:
        self._source, self._listed, self.option = tables, listed or {}, option
        self._references = [node for node in _nodes(tree) if node.get("class") == "COLUMN_REF"]
        self._stars = [node for node in _nodes(tree) if node.get("class") == "STAR"]
        self._named = [node["table_name"].lower() for node in _nodes(tree) if node.get("type") == "BASE_TABLE"]

    @property
    def tables(self) -> list[str]:
        """The tables of runs that are named."""
        return [name for name in NAMES if name in self._named]

    def of(self, table: str) -> tuple[list[str], list[str]]:
        """(names that `*` means, dotted names) of a table."""
        return self._source.columns(table) if self._source else (self._listed[table], [])

    def known(self) -> list[str]:
        """Every name that the tables in question have."""
        names = self.tables or list(self._listed) or ["metrics"]
        return list(dict.fromkeys(name for table in names for part in self.of(table) for name in part))

    def give_table(self, tree: dict[str, Any]) -> None:
        """A select without a table takes the first one that has all its columns, and else the closest one."""
        node = tree["statements"][0]["node"]
        if (node.get("from_table") or {}).get("type") != "EMPTY":
            return
        words = {".".join(each["column_names"]).lower() for each in self._references}
        words -= {each.get("alias", "").lower() for each in node["select_list"]}
        of_steps = {name.lower() for name in self.of("metrics")[0] if name not in FACTS} | {"step"}
        order = ("metrics", *NAMES) if words & of_steps else NAMES
        best = max(order, key=lambda name: len(self._names_of(name) & words))
        node["from_table"] = _table_node(best, node["from_table"])
        self._named.append(best)

    def _names_of(self, table: str) -> set[str]:
        return {name.lower() for part in self.of(table) for name in part}

    def join_dotted_names(self) -> None:
        """Make `train.lr`, which SQL reads as a column of the table `train`, the column of that name."""
        exact = {name.lower(): name for name in self.known()}
        for node in self._references:
            names = node["column_names"]
            for first in range(min(2, len(names) - 1)):
                if (whole := exact.get(".".join(names[first:]).lower())) is not None:
                    node["column_names"] = [*names[:first], whole]
                    break

    def needed(self, table: str) -> list[str]:
        """The columns of a table that the query may read."""
        plain, dotted = self.of(table)
        words = {part.lower() for node in self._references for part in node["column_names"]}
        every = [*plain, *dotted]
        if any(node["columns"] for node in self._stars):
            return every
        return [name for name in every if name.lower() in words or (self._stars and name in plain)]

    def sentence(self, error: Exception) -> str:
        """An error of duckdb as one sentence."""
        text = str(error)
        column = re.search(r'Referenced column "(.+?)" not found|does not have a column named "(.+?)"', text)
        if column:
            return self._no_column(column[1] or column[2])
        if table := re.search(r'Referenced table "(.+?)" not found', text):
            dotted = (node["column_names"] for node in self._references if node["column_names"][0] == table[1])
            return self._no_column(".".join(next(dotted, [table[1]])))
        if table := re.search(r"Table with name (.+) does not exist", text):
            return f"no table '{table[1]}'{nearest(table[1], NAMES)}; there are {', '.join(NAMES)}"
        if function := re.search(r"Function with name (\S+) does not exist", text):
            return (
                f"no function '{function[1]}'; there are min, max, avg, median, stddev, count, last, arg_min and more"
            )
        if "file system operations are disabled" in text:
            return f"the tables are {', '.join(NAMES)}, and no file is read"
        return _first_line(text)

    def _no_column(self, name: str) -> str:
        known = self.known()
        where = f" in {' and '.join(self.tables)}" if self.tables else ""
        plain = [column for column in known if "." not in column]
        more = f" and {len(plain) - SHOWN} more" if len(plain) > SHOWN else ""
        return f"no column '{name}'{where}{nearest(name, known)}; there are {', '.join(plain[:SHOWN])}{more}"


def _table_node(name: str, empty: Mapping[str, Any]) -> dict[str, Any]:
    """The node of a table in the place of the node of none."""
    node = {"type": "BASE_TABLE", "alias": "", "sample": None, "query_location": empty["query_location"]}
    node |= {"schema_name": "", "table_name": name, "column_name_alias": [], "catalog_name": "", "at_clause": None}
    return node | {"qualified_name": {"path": [name]}}


def _register(con: Any, table: str, tables: Tables, names: Sequence[str]) -> None:
    """Make a view of a table with the columns of these names."""
    runs, rows = tables.load(table, names)
    shown = ", ".join(map(_quoted, names)) or "1 AS nothing"
    con.register(f"{table} of runs", runs)
    joined = f'"{table} of runs"'
    if rows is not None:
        con.register(f"{table} of rows", rows)
        joined = f'"{table} of rows" JOIN {joined} USING ("{PLACE}")'
    con.execute(f'CREATE VIEW "{table}" AS SELECT {shown} FROM {joined}')


def _group(con: Any, tree: dict[str, Any]) -> bool:
    """Group by the plain columns beside aggregates, in each select of the tree; returns whether the outer one was so
    grouped and has no order."""
    listed = con.execute("SELECT DISTINCT function_name FROM duckdb_functions() WHERE function_type = 'aggregate'")
    names = {name for (name,) in listed.fetchall()}
    grouped = [node for node in _nodes(tree) if node.get("type") == "SELECT_NODE" and _is_mixed(node, names)]
    for node in grouped:
        node["aggregate_handling"] = "FORCE_AGGREGATES"
    top = tree["statements"][0]["node"]
    return top in grouped and not any(each["type"] == "ORDER_MODIFIER" for each in top["modifiers"])


def _is_mixed(node: Mapping[str, Any], names: set[str]) -> bool:
    """Whether a select without groups has aggregates beside other columns."""
    if node["group_expressions"] or node["aggregate_handling"] != "STANDARD_HANDLING":
        return False
    are_aggregates = [_aggregates(part, names) for part in node["select_list"]]
    return any(are_aggregates) and not all(are_aggregates)


def _aggregates(tree: Any, names: set[str]) -> bool:
    """Whether an expression has an aggregate outside of windows and of selects inside it."""
    if isinstance(tree, list):
        return any(_aggregates(part, names) for part in tree)
    if not isinstance(tree, dict) or tree.get("class") in ("WINDOW", "SUBQUERY"):
        return False
    is_one = tree.get("class") == "FUNCTION" and tree["function_name"].lower() in names and not tree["is_operator"]
    return is_one or any(_aggregates(part, names) for part in tree.values())


def _run(con: Any, sql: str, columns: _Columns) -> pa.Table:
    import duckdb

    try:
        return _plain(con.sql(sql).to_arrow_table())
    except duckdb.Error as error:
        raise UserError(f"{columns.option}: {columns.sentence(error)}") from None


def _plain(table: pa.Table) -> pa.Table:
    """Decimals, as sums of integers are, as integers or floats."""
    for place, column in enumerate(table.schema):
        if pa.types.is_decimal(column.type):
            kind = pa.int64() if column.type.scale == 0 else pa.float64()
            table = table.set_column(place, column.name, table.column(place).cast(kind, safe=False))
    return table


def _first_line(text: str) -> str:
    line = re.sub(r"^[A-Za-z ]*Error: ", "", text.strip().split("\n")[0])
    return line.replace('"', "'").rstrip(".!")
