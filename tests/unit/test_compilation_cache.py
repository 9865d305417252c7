"""The folder of JAX's compiled programs: whose it is, for which machine, and what is said where
it cannot be had.
"""

import os
import tempfile
from pathlib import Path

import jax
import pytest

from twinfer.shared.cache_folder import default_root, fingerprint, open_private
from twinfer.shared.errors import ConfigError
from twinfer.tpu import compilation_cache
from twinfer.tpu.compilation_cache import cpu_features, factors, use_cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A function that calls `use_cache`, with JAX as a user finds it; afterwards all is as it
    was.
    """
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    names += ("jax_persistent_cache_min_entry_size_bytes", "jax_compilation_cache_max_size")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compilation_cache, "_chosen_here", None)
    jax.config.update("jax_compilation_cache_dir", None)
    yield lambda asked=None: use_cache(asked, jax.devices("cpu"))
    compilation_cache._set_folder(before["jax_compilation_cache_dir"])
    for name, value in before.items():
        jax.config.update(name, value)


def test_no_test_reaches_the_users_cache():
    assert default_root("jax").is_relative_to(tempfile.gettempdir())
    assert not default_root("jax").is_relative_to(Path.home() / ".cache")


def test_a_relative_cache_home_counts_as_none(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert default_root("jax") == Path.home() / ".cache" / "twinfer" / "jax"


def test_the_default_is_a_private_folder_of_this_machine(cache, tmp_path):
    change = cache()
    folder = tmp_path / "twinfer" / "jax" / fingerprint(factors(jax.devices("cpu")))
    assert (change.before, change.after) == (None, str(folder))
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cache() == change  # an engine after it


def test_nobody_reads_what_is_half_written(cache):
    """JAX writes entries in place, and locks the folder if it may not grow for ever."""
    jax.config.update("jax_compilation_cache_max_size", -1)
    folder = Path(cache().after)
    jax.jit(lambda x: x * 3 + 1).lower(jax.ShapeDtypeStruct((7,), "float32")).compile()
    assert list(folder.glob("*-cache"))
    assert (folder / ".lockfile").exists()


def test_what_jax_was_told_stays(cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    change = cache()
    assert (change.after, change.why) == (str(tmp_path / "mine"), "JAX's own setting")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")


def test_none_switches_it_off_and_the_next_engine_has_it_again(cache):
    kept = cache()
    assert cache("none").after == "none"
    assert jax.config.jax_compilation_cache_dir is None
    assert cache() == kept


@pytest.mark.parametrize("named", [False, True])
def test_a_folder_that_cannot_be_written_costs_one_line(cache, tmp_path, named):
    (tmp_path / "twinfer").write_text("a file, where a folder should be")
    folder = tmp_path / "twinfer" / "jax"
    with pytest.warns(UserWarning, match=rf"not kept: \[Errno.*{folder}.*each start") as told:
        change = cache(str(folder) if named else None)
    (warning,) = told
    assert "\n" not in str(warning.message)
    assert change.after == "none"
    assert "compiled programs are not kept: [Errno" in change.why
    assert jax.config.jax_compilation_cache_dir is None


def test_a_folder_that_others_may_write_to_is_not_used(cache, tmp_path):
    folder = Path(cache().after)
    folder.chmod(0o770)
    with pytest.warns(UserWarning, match=f"got {folder}, which others may write to"):
        change = cache()
    assert change.after == "none"
    assert "which others may write to" in change.why
    assert jax.config.jax_compilation_cache_dir is None
    with pytest.raises(
        ConfigError, match=f"compilation_cache_dir: got {folder}, which others may write to"
    ):
        cache(str(folder.parent))
    folder.chmod(0o700)
    folder.parent.chmod(0o777)  # others could put another folder in its place
    with pytest.warns(UserWarning, match="which others may write to"):
        cache()
    folder.parent.chmod(0o1777)
    assert cache().after == str(folder)


def test_another_users_folder_is_not_used(cache, monkeypatch):
    cache()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.warns(UserWarning, match="which others may write to"):
        assert "which others may write to" in cache().why


@pytest.mark.parametrize("what", ["version", "cpu_features"])
def test_what_was_compiled_for_something_else_lies_elsewhere(what, monkeypatch):
    here = factors(jax.devices("cpu"))
    monkeypatch.setattr(compilation_cache, what, lambda *_: "another")
    assert fingerprint(factors(jax.devices("cpu"))) != fingerprint(here)


def test_each_engine_keeps_its_programs_where_it_says(cache, tmp_path):
    """JAX opens a folder once, unless it is told to forget it."""
    folders = [Path(cache().after), Path(cache(str(tmp_path / "other")).after)]
    cache()
    kept = []
    for number, asked in enumerate([None, str(tmp_path / "other"), "none"]):
        cache(asked)
        jax.jit(lambda x, n=number: x * (n + 3.5)).lower(
            jax.ShapeDtypeStruct((3,), "float32")
        ).compile()
        kept.append([len(list(folder.glob("*-cache"))) for folder in folders])
    assert kept == [[1, 0], [1, 1], [1, 1]]


def test_the_instructions_of_a_cpu(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor\t: 0\nflags\t\t: sse avx2 fma\nmodel name : a CPU\nflags : fma amx_bf16\n"
    )
    assert cpu_features(info) == ["amx_bf16", "avx2", "fma", "sse"]
    assert len(cpu_features(tmp_path / "missing")) == 1


def test_a_folder_of_other_factors_is_emptied(tmp_path):
    folder = open_private("option", tmp_path, {"a": 1})
    (folder / "entry").write_text("code")
    assert (open_private("option", tmp_path, {"a": 1}) / "entry").exists()
    (folder / "factors.json").write_text("{}")
    assert not (open_private("option", tmp_path, {"a": 1}) / "entry").exists()
