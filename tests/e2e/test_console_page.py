"""The console's page in a real browser, with live data: every panel, every width, by keyboard."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc.events import LSN
from tests.fixtures.archived import Archived
from tests.fixtures.browser import complaints, findings, requested, show_as
from tests.fixtures.console import ConsoleUnderTest
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.issuer import AUDIENCE, TestIssuer
from tests.fixtures.login_proxy import LOGIN, LoginProxy
from tests.integration.test_console_actions import given_up
from tests.integration.test_wait import FOLLOWERS, FakeFollower

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = [pytest.mark.long("starts Chromium"), pytest.mark.timeout(400)]

_EVIL = "<img src=x onerror=alert(1)>"
_TABLES = (
    f'CREATE TABLE "{_EVIL}" (id int PRIMARY KEY, note text)',
    "CREATE TABLE t (id int PRIMARY KEY, note text)",
    "ALTER TABLE t REPLICA IDENTITY FULL",
)
_HOOK = {"url": "https://example.com/hook", "secrets": ["whsec_QUJD"], "tables": ["public.t"]}
_WIDTHS = (320, 375, 768, 1280, 3840)

Page = Callable[..., ConsoleUnderTest]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What ends with the test."""
    with ExitStack() as found:
        yield found


@pytest.fixture
def line(pipeline: NewPipeline) -> PipelineUnderTest:
    line = pipeline(*_TABLES, followers=FOLLOWERS, webhooks={"hook": _HOOK})
    line.start().wait_ready()
    follower = FakeFollower(line.config)
    follower.report(lsn=LSN(1), state="following", began_at_us=time.time_ns() // 1_000)
    line.database.execute("INSERT INTO t SELECT i, 'before' FROM generate_series(1, 50) i")
    wait_until(line.frontiers, "the log has no frontier")
    return line


@pytest.fixture
def page(line: PipelineUnderTest, browser: Chrome, stack: ExitStack, tmp_path: Path) -> Page:
    """Open a console's page; `options` are further ones of its command."""

    def open_(*options: str) -> ConsoleUnderTest:
        file = line.write("console.yaml", http__listen=f"127.0.0.1:{line.daemon.port}")
        shown = ConsoleUnderTest(file, tmp_path / "console.log", *options)
        stack.callback(shown.close)
        requested(browser)
        show_as(browser, 1280)
        browser.get(f"http://127.0.0.1:{shown.port}/")
        wait_until(lambda: "webhook" in text(browser, "#causes"), "no verdict is shown")
        # Written while it looks: the tail has it.
        line.database.execute(
            f"INSERT INTO \"{_EVIL}\" VALUES (7, '<script>alert(2)</script>')",
            "UPDATE t SET note = '<b>after</b>' WHERE id = 7",
        )
        wait_until(lambda: "<b>after</b>" in text(browser, "#tail"), "the tail shows nothing")
        return shown

    return open_


def text(browser: Chrome, selector: str) -> str:
    """Return what a part of the page shows."""
    found = browser.execute_script(
        "return document.querySelector(arguments[0]).innerText", selector
    )
    return str(found)


def count(browser: Chrome, selector: str) -> int:
    return int(
        browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector)
    )


def click(browser: Chrome, selector: str) -> None:
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


def write_in(browser: Chrome, selector: str, value: str) -> None:
    browser.execute_script(
        "const field = document.querySelector(arguments[0]); field.value = arguments[1];"
        "field.dispatchEvent(new Event('input', { bubbles: true }));",
        selector, value,
    )  # fmt: skip


def test_every_panel_shows_live_data_as_text_and_nothing_leaves_the_machine(
    page: Page, line: PipelineUnderTest, browser: Chrome
) -> None:
    chosen = given_up(line, "webhook.hook", 1)
    shown = page()
    assert text(browser, "#sentence").startswith("✗")
    assert "hook has never run" in text(browser, "#causes")
    flow = text(browser, "#flow")
    assert all(each in flow for each in (line.database.name, "Kafka log", "cache", "lag"))
    assert "of WAL" in text(browser, "#slot")
    assert "cdc webhook run hook" in text(browser, "#webhooks")
    assert "failed: " in text(browser, "#incidents")
    wait_until(lambda: f"public.{_EVIL}" in text(browser, "#tables"), "the table is not listed")
    tail = text(browser, "#tail")
    assert f"public.{_EVIL}" in tail
    assert "<script>alert(2)</script>" in tail
    assert "before → <b>after</b>" in tail
    wait_until(lambda: "commit to log" in text(browser, "#chart"), "no chart", 30)
    wait_until(lambda: "p99" in text(browser, "#chart"), "no latency", 30)
    click(browser, "#dead-title ~ details summary")
    wait_until(lambda: chosen in text(browser, "#dead"), "the dead letter is not shown")
    assert "HTTP 400 <b>no</b>" in text(browser, "#dead")
    assert f"cdc webhook send hook {chosen}" in text(browser, "#dead")
    click(browser, "#dead-title ~ details:last-of-type summary")
    click(browser, "#large-list")
    wait_until(lambda: "there are none" in text(browser, "#large"), "the list does not arrive", 60)
    click(browser, "#tail button.link")
    wait_until(lambda: "newest first" in text(browser, "#explain"), "it explains nothing")
    assert "all that Kafka still has" in text(browser, "#explain")
    assert count(browser, "#explain ol li") >= 1
    # Read-only: the commands are shown, and no button runs one.
    write_in(browser, "[data-action=snapshot] input", f"public.{_EVIL}")
    assert f"cdc snapshot start 'public.{_EVIL}'" in text(browser, "#actions")
    assert count(browser, "#actions .act button:enabled, #dead button:enabled") == 0
    # Names and values have become no elements, and the policy had nothing to refuse.
    assert (
        browser.execute_script("return document.querySelectorAll('img, b:not(.row b)').length") == 0
    )
    assert complaints(browser) == []
    assert requested(browser) == {("http", f"127.0.0.1:{shown.port}")}


def test_a_console_that_stops_answering_is_unknown_and_comes_back(
    page: Page, browser: Chrome
) -> None:
    shown = page()
    click(browser, "#dead-title ~ details summary")
    shown.process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: text(browser, "#sentence").startswith("?"), "it stays as it was", 30)
        assert "does not answer" in text(browser, "#sentence")
        assert text(browser, "#age") == ""
    finally:
        shown.process.send_signal(signal.SIGCONT)
    wait_until(lambda: text(browser, "#sentence").startswith("✗"), "it stays unknown")


def test_a_long_topic_is_searched_further_back_when_asked_for(
    page: Page, line: PipelineUnderTest, browser: Chrome
) -> None:
    line.database.execute(
        "INSERT INTO t VALUES (-1, 'first')",
        "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1000, 300000) i",
        "UPDATE t SET note = 'last' WHERE id = -1",
    )
    wait_until(lambda: line.resume()[1].seq > 299_000, "the rows are not in the log")
    page()
    write_in(browser, "#explain-table", "public.t")
    write_in(browser, "#explain-key", "-1")
    click(browser, "#explain-form button")
    wait_until(lambda: "first → last" in text(browser, "#explain"), "nothing is found")
    assert "older versions are not shown" in text(browser, "#explain")
    assert count(browser, "#explain ol li") == 1

    def further() -> bool:
        browser.execute_script("document.querySelector('#further:enabled')?.click()")
        return "all that Kafka still has" in text(browser, "#explain")

    wait_until(further, "the search does not end")
    assert count(browser, "#explain ol li") == 2
    newest, oldest = text(browser, "#explain ol").split("insert")
    assert "first → last" in newest
    assert "note=first" in oldest
    assert complaints(browser) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_fits_every_width_and_is_accessible(
    page: Page, line: PipelineUnderTest, browser: Chrome, axe: str, *, dark: bool
) -> None:
    given_up(line, "webhook.hook", 1)
    page()
    click(browser, "#dead-title ~ details summary")
    write_in(browser, "[data-action=snapshot] input", "public." + "a_very_long_name" * 6)
    wait_until(lambda: "undecided" in text(browser, "#dead-note"), "no dead letter")
    wide = (
        "return [...document.querySelectorAll('body *')].filter((each) => !each.closest('.scroll')"
        " && !each.matches('.skip') && each.getBoundingClientRect().right > innerWidth + 0.5)"
        ".map((each) => `${each.tagName}#${each.id}.${each.className}`)"
    )
    for width in _WIDTHS:
        show_as(browser, width, dark=dark)
        overflow = "return document.scrollingElement.scrollWidth - innerWidth"
        assert browser.execute_script(overflow) <= 0, (width, browser.execute_script(wide))
        assert browser.execute_script(wide) == [], width
        assert findings(browser, axe) == [], width
    back = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(17, 21, 27)") is dark


def test_everything_is_reached_by_keyboard_and_keeps_the_focus(page: Page, browser: Chrome) -> None:
    from selenium.webdriver.common.action_chains import ActionChains  # noqa: PLC0415 - slow
    from selenium.webdriver.common.keys import Keys  # noqa: PLC0415 - as above

    page("--allow-actions")
    write_in(browser, "[data-action=snapshot] input", "public.t")
    write_in(browser, "[data-action=rebuild] input", "cache")
    click(browser, "#dead-title ~ details summary")
    wanted = browser.execute_script(
        "let number = 0; for (const each of document.querySelectorAll('a, button:enabled, input,"
        " summary, .scroll[tabindex]')) if (each.checkVisibility() && !each.closest('#tail'))"
        " each.dataset.reached = ++number; return number;"
    )
    browser.execute_script("document.activeElement?.blur(); window.scrollTo(0, 0)")
    seen = (
        "const at = document.activeElement, style = getComputedStyle(at);"
        "return [at.dataset.reached ?? '', at.closest('#tail') !== null,"
        " style.outlineStyle !== 'none' && style.outlineWidth !== '0px']"
    )
    reached = set[str]()
    for _ in range(wanted + 400):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        number, in_tail, outlined = browser.execute_script(seen)
        assert outlined or number == "", "the focus is not visible"
        if number:
            reached.add(number)
        elif not in_tail and len(reached) == wanted:
            break
    assert len(reached) == wanted
    # The page is drawn again every two seconds: what has the focus is not.
    browser.execute_script("document.querySelector('[data-action=snapshot] button').focus()")
    time.sleep(5)
    kept = "return document.activeElement.closest('[data-action]')?.dataset.action"
    assert browser.execute_script(kept) == "snapshot"


def test_a_button_runs_the_command_that_is_shown(page: Page, browser: Chrome) -> None:
    from selenium.webdriver.common.alert import Alert  # noqa: PLC0415 - slow

    page("--allow-actions")
    write_in(browser, "[data-action=snapshot] input", "public.t")
    command = text(browser, "[data-action=snapshot] code")
    assert command == "cdc snapshot start public.t"
    # From a task of its own: the question keeps the script waiting.
    browser.execute_script(
        "setTimeout(() => document.querySelector('[data-action=snapshot] button').click())"
    )
    alert = Alert(browser)
    wait_until(lambda: asked(alert), "nothing is asked")
    assert command in alert.text
    alert.accept()
    wait_until(lambda: "exit code 0" in text(browser, "#acts"), "it does not end")
    assert command in text(browser, "#acts")
    wait_until(lambda: "read" in text(browser, "#tail"), "no row is read again")
    wait_until(lambda: "is read again" in text(browser, "#incidents"), "it is not noted")


def visit(
    line: PipelineUnderTest, browser: Chrome, stack: ExitStack, log: Path, *options: str
) -> ConsoleUnderTest:
    """Start a console and open its page, as a browser does that was never there."""
    file = line.write("console.yaml", http__listen=f"127.0.0.1:{line.daemon.port}")
    shown = ConsoleUnderTest(file, log, *options)
    stack.callback(shown.close)
    show_as(browser, 1280)
    browser.get(f"http://127.0.0.1:{shown.port}/")
    return shown


def test_explain_shows_every_version_of_a_row_from_the_archive(
    pipeline: NewPipeline, browser: Chrome, stack: ExitStack, tmp_path: Path
) -> None:
    line = pipeline(
        *_TABLES,
        followers=FOLLOWERS,
        archive={"path": str(tmp_path / "archive")},
        source={"canary_seconds": 0},
    )
    line.start().wait_ready()
    line.database.execute(
        "INSERT INTO t VALUES (7, 'one')",
        "UPDATE t SET note = '<b>two</b>' WHERE id = 7",
        "DELETE FROM t WHERE id = 7",
    )
    Archived(line).reach()
    FakeFollower(line.config).report(lsn=LSN(1), seq=2)
    visit(line, browser, stack, tmp_path / "console.log")
    wait_until(lambda: "cache" in text(browser, "#flow"), "the stores are not known")
    write_in(browser, "#explain-table", "public.t")
    write_in(browser, "#explain-key", "7")
    click(browser, "#explain-form button")
    wait_until(lambda: "insert" in text(browser, "#explain"), "it explains nothing", 60)
    assert count(browser, "#explain .rows > li") == 3
    # The newest first.
    deleted, updated, inserted = (
        text(browser, f"#explain .rows > li:nth-child({number})") for number in (1, 2, 3)
    )
    for seq, found, op in ((3, deleted, "delete"), (2, updated, "update"), (1, inserted, "insert")):
        assert op in found
        assert f"seq {seq} · 0/" in found
        assert "transaction " in found
        assert "from the archive" in found
        assert ("cache has it" if seq <= 2 else "cache not yet") in found
    assert "note=one → <b>two</b>" in updated
    write_in(browser, "#explain-key", "8")
    click(browser, "#explain-form button")
    wait_until(lambda: count(browser, "#explain .rows > li") == 0, "a row that never was", 60)
    assert complaints(browser) == []


def test_the_tail_pauses_and_shows_what_is_asked_for(
    page: Page, line: PipelineUnderTest, browser: Chrome
) -> None:
    page()
    number = iter(range(1_000, 100_000))

    def written(*statements: str) -> str:
        """Commit statements with a number of their own; return what marks their rows."""
        mark = f"mark{next(number)}"
        line.database.execute(*(each.format(mark) for each in statements))
        return mark

    def appears(statement: str) -> None:
        """Commit it again and again: a stream that has just started shows what comes after it."""
        marks = list[str]()

        def shows() -> bool:
            marks.append(written(statement))
            return any(mark in text(browser, "#tail") for mark in marks)

        wait_until(shows, f"{statement} is not shown")

    of_t, of_evil = (
        f"UPDATE {name} SET note = '{{}}' WHERE id = 7" for name in ("t", f'"{_EVIL}"')
    )
    appears(of_t)
    click(browser, "#pause")
    assert text(browser, "#pause") == "Continue"
    mark = written(of_t, of_evil)
    # What was committed before the pause may arrive after it.
    more = r"paused, ([2-9]|\d\d+) newer"
    wait_until(lambda: re.search(more, text(browser, "#tail-note")), "they are not counted")
    assert mark not in text(browser, "#tail")
    click(browser, "#pause")
    wait_until(lambda: text(browser, "#tail").count(mark) == 2, "they are not shown then")
    # By table.
    write_in(browser, "#tail-table", "public.t")
    appears(of_t)
    assert _EVIL not in text(browser, "#tail")
    mark = written(of_evil, of_t)
    wait_until(lambda: mark in text(browser, "#tail"), "it is not shown")
    assert text(browser, "#tail").count(mark) == 1
    assert _EVIL not in text(browser, "#tail")
    # By operation.
    for op in ("c,r", "u", "m"):
        click(browser, f"[name=op][value='{op}']")
    deletes = "DELETE FROM t WHERE id = (SELECT max(id) FROM t)"

    def deleted() -> bool:
        written(of_t, deletes)
        return "delete" in text(browser, "#tail")

    wait_until(deleted, "no delete is shown")
    assert "update" not in text(browser, "#tail")
    # By key.
    click(browser, "[name=op][value=u]")
    write_in(browser, "#tail-key", "8")
    appears("UPDATE t SET note = '{}' WHERE id = 8")
    mark = written(of_t, "UPDATE t SET note = '{}' WHERE id = 8")
    wait_until(lambda: mark in text(browser, "#tail"), "it is not shown")
    assert "id=7" not in text(browser, "#tail")
    assert complaints(browser) == []


def test_a_token_is_asked_for_and_kept_for_the_tab_alone(
    line: PipelineUnderTest, browser: Chrome, stack: ExitStack, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef\n", "utf-8")
    right = token.read_text("utf-8").strip()
    log = tmp_path / "console.log"
    shown = visit(line, browser, stack, log, "--token-file", str(token))

    def asks() -> bool:
        return bool(
            browser.execute_script(
                "return document.getElementById('login').checkVisibility()"
                " && !document.getElementById('console').checkVisibility()"
            )
        )

    def give(value: str) -> None:
        write_in(browser, "#token", value)
        click(browser, "#login button")

    wait_until(asks, "it asks for no token")
    assert text(browser, "#login-error") == ""
    give("f" * 32)
    wait_until(lambda: "not accepted" in text(browser, "#login-error"), "any token is accepted")
    assert asks()
    assert line.config.pipeline not in browser.page_source, "data are shown"
    give(right)
    wait_until(lambda: "has never run" in text(browser, "#causes"), "no verdict is shown")
    assert not asks()
    browser.refresh()
    wait_until(lambda: "has never run" in text(browser, "#causes"), "the tab has forgotten it")
    # Another tab starts without; a link brings it, and leaves none in the address.
    browser.execute_script("sessionStorage.clear()")
    browser.refresh()
    wait_until(asks, "it is kept elsewhere")
    browser.get("about:blank")
    browser.get(f"http://127.0.0.1:{shown.port}/#token={right}")
    wait_until(lambda: "has never run" in text(browser, "#causes"), "the link brings none")
    assert browser.current_url == f"http://127.0.0.1:{shown.port}/"
    assert right not in browser.page_source
    assert right not in str(requested(browser))
    browser.execute_script("sessionStorage.clear()")
    assert shown.close() == 0
    assert right not in shown.log_file.read_text("utf-8")


def asked(alert: object) -> bool:
    from selenium.common.exceptions import NoAlertPresentException  # noqa: PLC0415 - slow

    try:
        return bool(getattr(alert, "text"))  # noqa: B009 - it raises
    except NoAlertPresentException:
        return False


def test_who_comes_by_a_proxy_is_asked_for_no_token(
    line: PipelineUnderTest, browser: Chrome, stack: ExitStack, tmp_path: Path
) -> None:
    """The proxy knows a viewer by its cookie; buttons work for those who may act."""
    made_by = stack.enter_context(TestIssuer())
    groups = ["eng"]
    given = ("--oidc-issuer", made_by.url, "--oidc-audience", AUDIENCE)
    lists = ("--allow-actions", "--actor", "group:oncall")
    shown = visit(line, browser, stack, tmp_path / "console.log", *given, *lists)
    assert shown.port is not None

    def forwarded() -> str:
        return made_by.token(groups=groups)

    def button() -> bool:
        return bool(
            browser.execute_script(
                "return document.querySelector('[data-action=pause] button').disabled"
            )
        )

    def signed_out() -> bool:
        return bool(
            browser.execute_script(
                "return document.getElementById('signed-out').checkVisibility()"
                " && !document.getElementById('login').checkVisibility()"
            )
        )

    # Not by the proxy: there is nothing to type.
    wait_until(signed_out, "it does not say that the proxy is missing")
    assert "sends no headers Authorization" in text(browser, "#signed-out")
    proxy = stack.enter_context(LoginProxy(shown.port, forwarded))
    browser.get(proxy.url + LOGIN)
    browser.get(proxy.url)
    wait_until(lambda: "has never run" in text(browser, "#causes"), "no verdict is shown")
    assert text(browser, "#viewer") == "ann@example.com"
    assert not signed_out()
    assert button()
    assert "not in console.oidc.actors" in text(browser, "#act-state")
    line.database.execute("UPDATE t SET note = 'by the proxy' WHERE id = 7")
    wait_until(lambda: "by the proxy" in text(browser, "#tail"), "the tail shows nothing")
    groups.append("oncall")
    wait_until(lambda: not button(), "the button stays off")
    browser.execute_script("window.confirm = () => true")
    click(browser, "[data-action=pause] button")
    wait_until(lambda: "by ann@example.com, 127.0.0.1" in text(browser, "#acts"), "it is not run")
    for status in (302, 401, 403):
        proxy.log_out(status)
        wait_until(signed_out, "it does not say that the session has ended")
        wait_until(lambda: text(browser, "#sentence").startswith("?"), "the verdict stays")
        proxy.log_in()
        wait_until(lambda: not signed_out(), "it does not go on")
    assert "eyJ" not in browser.page_source
    assert shown.close() == 0
    assert "eyJ" not in shown.log_file.read_text("utf-8")
