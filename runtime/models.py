"""Turn a model's name on the command line into a model, its inputs and its loss.

In: `FILE.py:build`, `hf:PATH/config.json` or `hf:NAME`. Out: `Loaded`. A file is
imported, which runs it; a config is only read: no code from it, no download, no weights.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from keyword import iskeyword
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn

from runtime.errors import Refused, UsageError
from runtime.named_models import NAMED

DEFAULT_BATCH = 4
LONGEST_DEFAULT_SEQ = 8192

Batch: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Loaded:
    """`model(*args, **kwargs)` runs it; `loss` of its output is the loss (None: it is the loss)."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None
    name: str
    stream: Callable[[], Iterator[Batch]] | None = None

    def batches(self) -> Iterator[Batch]:
        """(args, kwargs) per step: what the file's `batches()` yields, else one batch for ever."""
        return self.stream() if self.stream else repeat((self.args, self.kwargs))


def load_model(
    spec: str,
    *,
    seq: int | None = None,
    batch: int | None = None,
    device: str = "meta",
    seed: int = 0,
    sizes_must_fit: bool = True,
) -> Loaded:
    """Load `FILE.py:build`, `hf:PATH/config.json` or `hf:NAME`.

    A file may also have `loss(output)`, and `batches()` that yields an (args, kwargs) per step.
    `seq` (tokens per row) and `batch` (rows) size the inputs of `hf:` models, and of a file whose
    `build` has parameters of these names. `device` is where `hf:` models are built: "meta" (no
    memory) or "cpu" (random weights from `seed`); a file's `build` chooses for itself, but "cpu"
    insists on real weights. Without `sizes_must_fit`, a `build` that takes no sizes is called
    without. Raises UsageError, also for a file that is no Python, or Refused where the model fails.
    """
    if not isinstance(spec, str):  # of a run.json that somebody wrote
        raise UsageError(f"a model is named FILE.py:build or hf:NAME, and not {spec!r}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if spec.startswith("hf:"):
            return _load_hugging_face(spec[3:], seq, batch, device)
        loaded = _load_file(spec, seq, batch, sizes_must_fit)
    if device != "meta" and (name := _first_on_meta(loaded.model)):
        raise Refused(
            f"{spec} has no weights: {name} is on the meta device. That is enough for planning; "
            "to run it, build() has to make real weights."
        )
    return loaded


def _first_on_meta(model: nn.Module) -> str | None:
    state = [*model.named_parameters(), *model.named_buffers()]
    return next((name for name, tensor in state if tensor.is_meta), None)


def _load_file(
    spec: str, seq: int | None, batch: int | None, sizes_must_fit: bool
) -> Loaded:
    file, _, function = spec.rpartition(":") if ":" in spec else (spec, "", "build")
    path = Path(file)
    if not function:
        raise UsageError(
            f"can't load the model {spec!r}: a function's name is missing behind the colon, as in "
            f"{file}:build."
        )
    if path.suffix != ".py" or not path.is_file():
        why = "there is no such file" if path.suffix == ".py" else "it does not end in .py"
        raise UsageError(
            f"can't load the model {spec!r}: {why}. A model is FILE.py:build, "
            "hf:PATH/config.json, or hf:NAME such as hf:llama-3-8b."
        )
    with _folder_on_path(path):
        module = _import_file(path)
        build = getattr(module, function, None)
        if not callable(build) and (not function.isidentifier() or iskeyword(function)):
            raise UsageError(f"{function!r} can't be a function's name: write {path}:build.")
        if not callable(build):
            raise UsageError(
                f"{path} has no function {function!r}. A model file defines `def {function}():` "
                "that returns (model, args, kwargs), and may define `def loss(output):` beside it."
            )
        taken = inspect.signature(build).parameters
        if not sizes_must_fit:
            seq, batch = (seq if "seq" in taken else None), (batch if "batch" in taken else None)
        sizes = _sizes_taken(build, f"{path}:{function}", seq=seq, batch=batch)
        _check_calls(build, sizes, path, module)
        with _blame(path, f"{function}()"):
            built = build(**sizes)
    model, args, kwargs = _check_built(built, f"{function}() in {path}")
    loss, batches = (_optional_function(module, name, path) for name in ("loss", "batches"))
    stream = None
    if batches is not None:
        sizes = _sizes_taken(batches, f"{path}:batches", **sizes)
        stream = partial(_blamed_stream, path, batches, sizes)
    return Loaded(model, args, kwargs, loss, path.stem, stream)


def _optional_function(module: ModuleType, name: str, path: Path) -> Callable[..., Any] | None:
    value = getattr(module, name, None)
    if value is not None and not callable(value):
        raise UsageError(f"`{name}` in {path} is {type(value).__name__}, not a function")
    return value


def _import_file(path: Path) -> ModuleType:
    """Import by path, under a name that hides no other module and runs nothing of the path."""
    name = "shardwright_model_" + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the path ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        with _blame(path, "importing it"):
            spec.loader.exec_module(module)
    except (Refused, UsageError):
        del sys.modules[name]
        raise
    return module


@contextmanager
def _folder_on_path(path: Path) -> Iterator[None]:
    """Let a model file import its neighbours, as `python FILE.py` does."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


@contextmanager
def _blame(path: Path, what: str) -> Iterator[None]:
    """Turn what user code raises into one paragraph with the deepest line of the user's file."""
    try:
        yield
    except SyntaxError as error:  # of the file, or of one that it imports
        where = f"{error.filename or path}:{error.lineno}"
        raise UsageError(f"{where}: {what} raised {_in_short(error)}") from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if Path(f.filename).resolve() == path.resolve()]
        where = f"{path}:{lines[-1]}" if lines and lines[-1] else str(path)
        raise Refused(f"{where}: {what} raised {_in_short(error)}") from error


def _blamed_stream(
    path: Path, batches: Callable[..., Iterator[Batch]], sizes: dict[str, int]
) -> Iterator[Batch]:
    """What `batches` yields; what it raises is a paragraph."""
    with _blame(path, "batches()"):
        yield from batches(**sizes)


def _in_short(error: BaseException) -> str:
    """Class and message of an exception on one line, at most 300 characters."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")


def _sizes_taken(build: Callable[..., Any], name: str, **sizes: int | None) -> dict[str, int]:
    """The given sizes, if `build` has parameters for them."""
    given = {key: value for key, value in sizes.items() if value is not None}
    unknown = sorted(given.keys() - inspect.signature(build).parameters.keys())
    if unknown:
        flags = " and ".join(f"--{key}" for key in unknown)
        raise UsageError(
            f"{name} takes no {flags}: its inputs have the size that it gives them. Give the "
            f"function a parameter of that name with a default, or leave {flags} out."
        )
    return given


def _check_calls(
    build: Callable[..., Any], sizes: dict[str, int], path: Path, module: ModuleType
) -> None:
    """Refuses a function that needs more than the sizes: it is another one than that which builds
    the model."""
    name = getattr(build, "__name__", "the function")
    needed = [
        p.name for p in inspect.signature(build).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name not in sizes
    ]  # fmt: skip
    if not needed:
        return
    flags = [f"--{word} N" for word in needed if word in ("seq", "batch")]
    if len(flags) == len(needed):
        raise UsageError(f"{path}:{name} needs {' and '.join(flags)}: it has no default for that.")
    other = f" Did you mean {path}:build?" if callable(getattr(module, "build", None)) else ""
    raise UsageError(
        f"{path}:{name} is not a function that builds a model: it has to be called with "
        f"{', '.join(needed)}, and one that builds a model with nothing, or with seq and batch."
        f"{other if name != 'build' else ''}"
    )


def _check_built(built: object, where: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    match built:
        case (nn.Module() as model, tuple() | list() as args, dict() as kwargs):
            return model, tuple(args), kwargs
        case tuple() | list():
            got = "(" + ", ".join(type(part).__name__ for part in built) + ")"
        case _:
            got = type(built).__name__
    if inspect.iscoroutine(built):
        built.close()  # or Python warns that nobody waited for it
    raise UsageError(
        f"{where} returned {got}; it has to return (model, args, kwargs): an nn.Module, a tuple "
        "and a dict, so that model(*args, **kwargs) runs."
    )


def _load_hugging_face(name: str, seq: int | None, batch: int | None, device: str) -> Loaded:
    if not name.strip():
        raise UsageError(
            f"hf: names no model: write hf:PATH/config.json, or one of hf:{', hf:'.join(NAMED)}."
        )
    transformers = _transformers()
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix == ".json":
        config, dtype = _read_config(path, transformers)
        name = path.parent.resolve().name if path.name == "config.json" else path.stem
    elif name in NAMED:
        kind, dtype, fields = NAMED[name]
        config = getattr(transformers, kind)(**fields, use_cache=False)
    else:
        raise UsageError(_unknown_name(name))
    rows, tokens = DEFAULT_BATCH if batch is None else batch, _tokens(config, name, seq)
    model = _build_causal_lm(transformers, config, dtype, "meta", name)
    ids = torch.empty((rows, tokens), dtype=torch.int64, device="meta")
    if device != "meta":
        _refuse_too_big(model, name)
        model = _build_causal_lm(transformers, config, dtype, device, name)
        ids = torch.randint(config.get_text_config().vocab_size, (rows, tokens))
    kwargs = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    return Loaded(model, (), kwargs, _output_loss, name)


def _refuse_too_big(model: nn.Module, name: str) -> None:
    needed_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed_bytes > memory_bytes:
        raise Refused(
            f"the weights of hf:{name} are {needed_bytes / 2**30:.0f} GiB and this machine has "
            f"{memory_bytes / 2**30:.0f} GiB of memory. `plan` and `emit` need no weights."
        )


def _output_loss(output: Any) -> torch.Tensor:
    return output.loss


def _transformers() -> ModuleType:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(
            f"hf: models need the package transformers ({error}). "
            "Install it with: pip install 'shardwright[hf]'."
        ) from error


def _unknown_name(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), NAMED, n=3, cutoff=0.5)
    hint = f"Did you mean {', '.join(close)}?" if close else f"Known: {', '.join(NAMED)}."
    more = "Any other causal language model: hf:PATH/config.json."
    return f"no model is named hf:{name}. {hint} {more}"


def _read_config(path: Path, transformers: ModuleType) -> tuple[Any, torch.dtype]:
    """The config of a file and the dtype that it states (float32 if it states none)."""
    try:
        fields = json.loads(path.read_text())
        model_type = fields.pop("model_type")
    except OSError as error:
        raise UsageError(f"can't read the config {path}: {error.strerror}") from error
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not a Hugging Face config: it has to be a JSON object with a `model_type`"
        ) from error
    dtype = getattr(torch, str(fields.get("dtype") or fields.get("torch_dtype") or "float32"), None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{path} states a dtype that torch does not know")
    try:
        config = transformers.AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # a config class checks its fields in its own ways
        raise UsageError(f"{path} makes no config: {_in_short(error)}") from error
    config.use_cache = False
    return config, dtype


def _tokens(config: Any, name: str, seq: int | None) -> int:
    """Tokens per row: as asked, else the model's own context up to LONGEST_DEFAULT_SEQ."""
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None) or LONGEST_DEFAULT_SEQ
    if seq is None:
        return min(context, LONGEST_DEFAULT_SEQ)
    if seq > context and getattr(text, "rope_parameters", None) is None:
        raise UsageError(f"{name} has learned positions for {context} tokens, --seq asks {seq}")
    return seq


def _build_causal_lm(
    transformers: ModuleType, config: Any, dtype: torch.dtype, device: str, name: str
) -> nn.Module:
    _check_architecture(transformers, config, name)
    try:
        with torch.device(device):
            model = _with_fused_attention(transformers.AutoModelForCausalLM, config, dtype)
    except Exception as error:  # whatever a model class objects to, it is this config's fault
        raise Refused(
            f"transformers can't build hf:{name} as a causal language model: {_in_short(error)}"
        ) from error
    model.loss_type = "ForCausalLM"  # else transformers guesses it from the class name, and warns
    return model


def _check_architecture(transformers: ModuleType, config: Any, name: str) -> None:
    """Refuses a config of anything else than a causal language model."""
    mapping, named = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, config.architectures or []
    built = mapping[type(config)].__name__ if type(config) in mapping else None
    if built and (not named or built.lower() in [str(part).lower() for part in named]):
        return
    what = " and ".join(map(str, named)) or config.model_type
    other = f", here {built}" if built else ""
    raise Refused(
        f"hf:{name} is {what}, and hf: builds only the causal language model of a config{other}. "
        "For another model write FILE.py with a build() that makes it."
    )


def _with_fused_attention(auto: Any, config: Any, dtype: torch.dtype) -> Any:
    """The model with torch's scaled_dot_product_attention, or its own where it has no such."""
    try:
        return auto.from_config(config, dtype=dtype, attn_implementation="sdpa")
    except ValueError:
        return auto.from_config(config, dtype=dtype, attn_implementation="eager")
