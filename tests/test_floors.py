"""A file of app/ imports only from strictly lower floors, so no cycle is possible, by arithmetic."""

import ast
from pathlib import Path

APP = Path(__file__).resolve().parents[1] / "app"

FLOORS = {
    0: "__init__ errors settings telemetry",
    1: "tables arrays",
    2: "db migrations lanes",
    3: "jobs.model jobs.verdict schedules.cadence",
    4: "jobs.sql queues.sql keys.sql audit.record schedules.sql",
    5: "jobs.intake jobs.lease jobs.reclaim jobs.prune jobs.waiting queues.ops keys.ops",
    6: "jobs.epoch jobs.hints schedules.tasks schedules.firing schedules.tick schedules.ops",
    7: "web.jsontext web.pages web.shapes web.problems web.gate web.door web.incoming "
    "web.outgoing web.switch web.contract",
    8: "jobs.schemas jobs.http queues.schemas queues.http schedules.schemas schedules.http web.health web.reference "
    "web.wire loops",
    9: "main devdb demo worker",
    10: "serving cli_schedules cli",
    11: "__main__",
}
# Within the web's floor the files have an order of their own: reading, shapes, words, gate, door, description.
STEPS = {
    "web.pages": 0, "web.jsontext": 0, "web.shapes": 1, "web.problems": 2, "web.gate": 3, "web.door": 4,
    "web.incoming": 5, "web.outgoing": 5, "web.switch": 6,
    "web.contract": 5, "jobs.schemas": 0, "queues.schemas": 0, "serving": 0, "cli": 1, "web.health": 0,
    "lanes": 1, "jobs.http": 1, "queues.http": 1, "web.reference": 1, "loops": 0,
    "cli_schedules": 0,
    "schedules.tasks": 0, "schedules.firing": 0, "schedules.tick": 1, "schedules.ops": 2,
    "schedules.schemas": 1, "schedules.http": 2,
}  # fmt: skip


def floor_of(module: str) -> float:
    for floor, names in FLOORS.items():
        if module in names.split():
            return floor + STEPS.get(module, 0) / 10
    raise AssertionError(f"app/{module.replace('.', '/')}.py stands on no floor: give it one in this test")


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "app":
            base = node.module.removeprefix("app").lstrip(".")
            for alias in node.names:
                whole = f"{base}.{alias.name}".lstrip(".")
                is_module = (APP / (whole.replace(".", "/") + ".py")).exists()
                found.add(whole if is_module else base or "__init__")
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("app.") for alias in node.names if alias.name.startswith("app.")}
    return found


def test_imports_only_go_down():
    wrong = []
    for path in APP.rglob("*.py"):
        module = ".".join(path.relative_to(APP).with_suffix("").parts)
        if module.endswith("__init__"):
            assert module == "__init__" or not imports_of(path), f"{path} is a package's door and imports nothing"
            continue
        wrong += [
            f"{module} (floor {floor_of(module)}) imports {imported} (floor {floor_of(imported)})"
            for imported in imports_of(path)
            if floor_of(imported) >= floor_of(module)
        ]
    assert not wrong, "\n".join(wrong)


def test_the_database_owns_the_clock():
    asked = [
        f"{path.name}:{node.lineno}"
        for path in APP.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("now", "utcnow", "today")
        and isinstance(node.value, (ast.Name, ast.Attribute))
        and (node.value.id if isinstance(node.value, ast.Name) else node.value.attr) in ("datetime", "date")
    ]
    assert not asked
