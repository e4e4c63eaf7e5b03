"""Spark's classes in an archive that the JVM maps: that it is made and used, and that nothing depends on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from brokers import wait_for
from headrace.errors import OperatorError
from headrace.settings.values import CLIENT_VARIABLES
from headrace.spark import class_archive, java, session
from headrace.spark.class_archive import ClassArchive

SRC = Path(session.__file__).parents[2]
MADE_WITHIN_S = 700.0
A_MONTH_S = 31 * 86400
SESSION = """
from headrace.spark import session
spark = session.start("t", "local[1]", {"spark.driver.extraJavaOptions": "-Dof.settings=kept"})
told = spark.sparkContext._jvm.System.getProperty
print(told("of.environment"), told("of.settings"), spark.sql("select 1 + 1").collect()[0][0])
"""
NO_DUMPS = f"-XX:ErrorFile={os.devnull} -XX:-CreateCoredumpOnCrash"
ANSWER = "kept kept 2\n"


@pytest.fixture(autouse=True)
def _no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have options of their own, and no archive in anybody's cache."""
    monkeypatch.delenv(java.SUBMIT_OPTIONS, raising=False)
    monkeypatch.delenv(class_archive.VARIABLE, raising=False)


def run(classes: Path | str, options: str = "") -> subprocess.CompletedProcess[str]:
    """A session in a process of its own."""
    environment = {"PYTHONPATH": str(SRC), class_archive.VARIABLE: str(classes)}
    return subprocess.run(
        [sys.executable, "-c", SESSION],
        env={
            **os.environ,
            **environment,
            java.SUBMIT_OPTIONS: f"-Dof.environment=kept {java.SHORT_LIVED} {NO_DUMPS} {options}",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def assert_as_ever(ran: subprocess.CompletedProcess[str]) -> None:
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, ANSWER, "")


def of(folder: Path) -> ClassArchive:
    found = class_archive.of(java.find(), folder)
    assert found
    return found


@pytest.mark.timeout(1500)  # it is made at the lowest priority
def test_the_first_session_has_an_archive_made_when_it_ends_and_the_next_one_maps_it(tmp_path: Path) -> None:
    folder = tmp_path / "a folder" / "classes"
    archive = of(folder)
    assert_as_ever(run(folder))
    wait_for("an archive made in the background", lambda: archive.is_there, MADE_WITHIN_S, pause_s=0.2)
    wait_for("its maker to leave nothing else", lambda: len(list(folder.iterdir())) == 3, MADE_WITHIN_S)

    loaded = tmp_path / "loaded"
    assert_as_ever(run(folder, f"-Xlog:class+load:file={loaded}"))
    mapped = [line for line in loaded.read_text().splitlines() if "source: shared objects file (top)" in line]
    assert sum(" org.apache.spark." in line for line in mapped) > 2000

    # Java 17 dies of one that was cut short.
    size = archive.path.stat().st_size // 2
    os.truncate(archive.path, size)
    assert_as_ever(run(folder, f"-Xlog:class+load:file={loaded}"))
    assert "shared objects file (top)" not in loaded.read_text()

    # If it does so all the same, the next start is without.
    archive._size.write_text(str(size))
    if run(folder).returncode:
        assert not archive.path.exists()
        archive._tried.touch()  # not to be made again
        assert_as_ever(run(folder))


@pytest.mark.parametrize("damage", [b"", b"no archive" * 1000])
def test_java_starts_with_a_file_that_is_no_archive(tmp_path: Path, damage: bytes) -> None:
    archive = of(tmp_path)
    archive.path.write_bytes(damage)
    archive._size.write_text(str(len(damage)))
    tmp_path.chmod(0o700)
    command = [java.find().program, *archive.use().split(), "-version"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (0, "")
    assert "version" in ran.stderr


def test_a_cache_that_cannot_be_written_harms_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_as_ever(run(tmp_path / "file" / "classes"))


def test_a_server_passes_over_the_variable() -> None:
    assert class_archive.VARIABLE in CLIENT_VARIABLES


def test_off_makes_nothing_and_uses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(class_archive.VARIABLE, "off")
    assert class_archive.of(java.find()) is None
    monkeypatch.delenv(class_archive.VARIABLE)
    found = class_archive.of(java.find())
    assert found
    assert found.path.parent == tmp_path / "headrace" / "spark-classes"
    assert (found.use(), list(tmp_path.iterdir())) == ("", [])


@pytest.mark.parametrize("option", ["-Xshare:off", "-XX:SharedArchiveFile=/mine", "-XX:AOTCache=/mine"])
def test_what_the_user_says_of_archives_holds(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    found = java.find()
    assert session._class_archive(found, {}) is not None
    assert session._class_archive(found, {"spark.driver.extraJavaOptions": f"-Da=b {option}"}) is None
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", option)
    assert session._class_archive(found, {}) is None


def test_options_of_the_user_stand_behind_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(java.SUBMIT_OPTIONS, "-Xlog:gc -Dlog=mine")
    monkeypatch.setenv(java.LAUNCHER_OPTIONS, "-Xint")
    told = session._java_environment("-Dlog=ours", "")
    assert told[java.SUBMIT_OPTIONS] == "-Dlog=ours -Xlog:gc -Dlog=mine"
    assert told[java.LAUNCHER_OPTIONS] == "-Xint"


def test_where_other_things_are_on_the_class_path_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = java.find()
    assert session._class_archive(found, {"spark.driver.extraClassPath": "/mine.jar"}) is None
    monkeypatch.setenv("HADOOP_CONF_DIR", "/etc/hadoop")
    assert class_archive.of(found, tmp_path) is None
    monkeypatch.delenv("HADOOP_CONF_DIR")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "spark"))
    assert class_archive.of(found, tmp_path) is None
    (tmp_path / "spark" / "jars").mkdir(parents=True)
    assert class_archive.of(found, tmp_path) is not None
    (tmp_path / "spark" / "conf").mkdir()
    assert class_archive.of(found, tmp_path) is None


def test_another_java_and_other_jars_have_another_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    (tmp_path / "jars").mkdir()
    jar = tmp_path / "jars" / "core.jar"
    jar.write_bytes(b"1")
    one, other = (java.Java("/bin/java", 17, build) for build in ("17.0.1", "17.0.2"))
    paths = [class_archive.of(each, tmp_path) for each in (one, one, other)]
    jar.write_bytes(b"22")
    paths.append(class_archive.of(one, tmp_path))
    assert paths[0] == paths[1]
    assert len(set(paths)) == 3


def test_an_archive_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    archive = of(tmp_path)
    archive.path.touch(0o600)
    archive._size.write_text("0")
    tmp_path.chmod(0o700)
    assert f"-XX:SharedArchiveFile={archive.path}" in archive.use()
    archive._size.write_text("1")
    assert archive.use() == ""
    archive._size.write_text("0")
    archive.path.chmod(0o620)
    assert archive.use() == ""
    archive.path.chmod(0o600)
    tmp_path.chmod(0o777)
    assert archive.use() == ""


def test_an_archive_is_tried_by_one_at_a_time_and_not_again_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    maker = tmp_path / "python"
    maker.write_text(f"#!/bin/sh\necho >> {begun}\n")
    maker.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(maker))
    archive = of(tmp_path / "classes")
    for _ in range(3):
        archive._make_in_background()
    wait_for("the maker to begin", begun.exists)
    old = archive._tried.stat().st_mtime - A_MONTH_S
    os.utime(archive._tried, (old, old))
    archive._make_in_background()
    wait_for("the maker to begin again", lambda: begun.read_text() == "\n\n")


def test_without_room_on_the_disk_none_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_archive, "FREE_BYTES_MIN", 1 << 60)
    with pytest.raises(OperatorError, match="MB are free in"):
        of(tmp_path / "classes").make()


def test_a_java_that_writes_none_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = tmp_path / "python"
    maker.write_text("#!/bin/sh\necho Java has no such option\nexit 1\n")
    maker.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(maker))
    archive = of(tmp_path / "classes")
    with pytest.raises(OperatorError, match="Java has no such option"):
        archive.make()
    assert [path.suffix for path in archive.path.parent.iterdir()] == [".tried"]


def test_archives_that_were_not_used_for_long_and_all_but_a_few_are_removed(tmp_path: Path) -> None:
    ages_s = {
        "a.jsa": 10,
        "b.jsa": 20,
        "c.jsa": 30,
        "d.jsa": 40,
        "d.size": 40,
        "d.tried": A_MONTH_S,
        "e.7.new": A_MONTH_S,
    }
    ages_s |= {"f.tried": 10, "f.8.new": 10}
    for name, age_s in ages_s.items():
        path = tmp_path / name
        path.touch()
        at = path.stat().st_mtime - age_s
        os.utime(path, (at, at))
    class_archive.remove_old(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsa", "b.jsa", "c.jsa", "f.tried", "f.8.new"}
    os.utime(tmp_path / "b.jsa", (0, 0))
    class_archive.remove_old(tmp_path)
    assert not (tmp_path / "b.jsa").exists()


def test_a_java_that_says_which_one_it_is_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'it was run' >&2; exit 1\n")
    program.chmod(0o700)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    (tmp_path / "release").write_text('IMPLEMENTOR="Some"\nJAVA_VERSION="21.0.4"\n')
    assert str(java.find()) == f"Java 21 at {program}"
    (tmp_path / "release").write_text('JAVA_VERSION="1.8.0_292"\n')
    with pytest.raises(OperatorError, match="is Java 8, too old for Spark"):
        java.find()
    (tmp_path / "release").write_text("")
    with pytest.raises(OperatorError, match=re.escape("does not tell its version (it was run)")):
        java.find()
