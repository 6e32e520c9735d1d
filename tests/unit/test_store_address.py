from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from tunerd.records import RunFacts
from tunerd.settings import TuneSettings
from tunerd.system.store_address import StoreAddress, out_of_sight, password_from
from tunerd.vocabulary import Model, TargetSpec

SECRET = "h0rse%2Fstaple"
ADDRESS = f"postgresql+psycopg://team:{SECRET}@db.example:5433/tunerd?sslmode=require"
SHOWN = "postgresql+psycopg://team@db.example:5433/tunerd?sslmode=require"
BAD = {
    "nonsense": "it is no address of a store",
    f"mysql://team:{SECRET}@db/tunerd": "an address of no store that tunerd knows",
    f"postgresql://db/tunerd?password={SECRET}": "its options hold a password",
    f"postgresql://team:{SECRET}@x@db/tunerd": "write %40 for it",
    f"postgresql://team:{SECRET}@db:port/tunerd": "it is no address of a store",
    "sqlite://": "an SQLite store is one file",
    "sqlite:///:memory:": "an SQLite store is one file",
    f"sqlite://team:{SECRET}@db/x": "an SQLite store is one file",
}


def settings(**values: Any) -> TuneSettings:
    model = {"model": Path("m.onnx"), "out": Path("run"), "cpu_pct": 50, "slice_kind": "cpu"}
    return TuneSettings(**model | values)


def test_a_password_is_kept_apart_from_the_address() -> None:
    address = StoreAddress.parse(ADDRESS)
    assert address.shown == SHOWN
    assert address.url.password == "h0rse/staple"
    assert "staple" not in f"{address!r} {address}"


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg"])
def test_without_a_password_libpq_looks_for_one(scheme: str) -> None:
    address = StoreAddress.parse(f"{scheme}://team@db/tunerd")
    assert address.shown == "postgresql+psycopg://team@db/tunerd"
    assert address.url.password is None


def test_a_file_is_meant_absolutely(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    address = StoreAddress.parse("sqlite:///team.sqlite")
    assert address.file == tmp_path / "team.sqlite"
    assert StoreAddress.parse(address.shown) == address


@pytest.mark.parametrize(("text", "said"), BAD.items())
def test_a_bad_address_is_refused_without_its_password(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        StoreAddress.parse(text)
    with pytest.raises(ValidationError, match=said) as outer:
        settings(store=text)
    for found in (error, outer):
        assert "staple" not in "".join(traceback.format_exception(found.value))


def test_settings_hold_a_password_and_show_it_nowhere() -> None:
    found = settings(store=ADDRESS)
    facts = RunFacts.of(
        found,
        Model("net", "d", (), (), graph=None),  # type: ignore[arg-type]
        target=TargetSpec("llvm", "{}"),
        device="cpu",
        host={},
    )
    assert found.store == SHOWN
    assert found.store_address is not None
    assert found.store_address.url.password == "h0rse/staple"
    assert found.model_dump()["store"] == SHOWN
    texts = (repr(found), found.model_dump_json(), str(facts.to_json()), str(found.model_dump()))
    assert not [text for text in texts if "staple" in text or "password" in text]


def test_an_error_of_another_setting_does_not_show_the_password() -> None:
    with pytest.raises(ValidationError) as error:
        settings(store=ADDRESS, cpu_pct=None)
    assert "staple" not in "".join(traceback.format_exception(error.value))


def test_to_require_hits_needs_a_store() -> None:
    with pytest.raises(ValidationError, match="name it with --store"):
        settings(require_hit=True)


@pytest.mark.parametrize("words", [["--store", ADDRESS], [f"--store={ADDRESS}"]])
def test_a_password_leaves_the_command_line(words: list[str]) -> None:
    environment: dict[str, str] = {}
    moved = out_of_sight(["python", "-m", "tunerd", "tune", *words, "--json"], environment)
    assert moved is not None
    assert "staple" not in " ".join(moved)
    assert any(SHOWN in word for word in moved)
    password = password_from(environment)
    assert password == SecretStr("h0rse/staple")
    assert environment == {}
    assert StoreAddress.parse(SHOWN, password).url.password == "h0rse/staple"


@pytest.mark.parametrize("words", [[], ["--store", SHOWN], ["--store", "sqlite:////a/b"]])
def test_a_command_line_without_a_password_stays(words: list[str]) -> None:
    environment: dict[str, str] = {}
    assert out_of_sight(["tunerd", "tune", *words], environment) is None
    assert environment == {}


def test_a_password_in_the_entry_point_of_a_ray_job_is_refused() -> None:
    environment = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
    with pytest.raises(ValueError, match="the entry point of a Ray job is shown") as error:
        out_of_sight(["tunerd", "tune", "--store", ADDRESS], environment)
    assert "staple" not in str(error.value)
    assert out_of_sight(["tunerd", "tune", "--store", SHOWN], environment) is None
