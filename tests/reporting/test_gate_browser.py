"""The HTML page of a gate in headless Chromium; skipped where none is installed, except in CI."""

import os
import re
import shutil

import pytest
from tests.reporting import gate_reports as gates
from tests.reporting.pages import as_html

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZES = {"desktop": (1280, 900), "phone": (360, 780)}
HOSTILE = (
    "<script>document.title = 'owned'</script>",
    "<img src=https://evil.example/x.png onerror=document.title='owned'>",
    "</script></style></title><script>document.title = 'owned'</script>",
    "\" onmouseover=\"document.title='owned'",
    "javascript:document.title='owned'",
    "wordwithoutanyspace" * 300,
    "../../etc/passwd \u202e\x1b[31m =cmd()",
)


def missing(what):
    """Skip where a developer has no browser; fail in CI, which must have one."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} is not installed, and CI needs it to look at the page")
    pytest.skip(f"{what} is not installed")


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        missing("a Chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright")
    with sync_playwright() as playwright:
        # No sandbox: it does not work as root, and the page is our own.
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


class Visit:
    """An open page with its console messages and errors, and the URLs it requested."""

    def __init__(self, browser, path, size=(1280, 900), **options):
        width, height = size
        self.address, self.messages, self.requests = path.as_uri(), [], []
        viewport = {"width": width, "height": height}
        self.page = browser.new_page(viewport=viewport, **options)
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(self.address)

    def width(self):
        return self.page.evaluate("document.documentElement.scrollWidth - innerWidth")

    def assert_silent_and_offline(self):
        assert self.messages == []
        assert self.requests == [self.address]


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(as_html(gates.sample(), {"pyidwkg7fj": "print(1)\n"}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    answers = []
    for text in HOSTILE:
        mods = {"mask": {"name": text}, "score": {"name": text}, "dtype": text}
        answers.append(
            gates.answer(gates.wrong(text, problem=mods), test=text, failure="abcdefghij")
        )
        answers.append(gates.answer(gates.measured(text, kv=64)))
        answers.append(gates.answer(gates.record(text, status="unsupported", reason=text)))
    report = gates.report(
        *answers,
        command=HOSTILE[0],
        tier=HOSTILE[1],
        kernels=dict.fromkeys(HOSTILE, HOSTILE[2]),
        absent=dict.fromkeys(HOSTILE, HOSTILE[3]),
        harness=HOSTILE,
        baseline=HOSTILE[1],
        changes=tuple(
            gates.Change(kernel=text, case_id=text, standing="worse", reason=text)
            for text in HOSTILE
        ),
    )
    path = tmp_path_factory.mktemp("page") / "hostile.html"
    path.write_text(as_html(report, {"abcdefghij": "\n".join(HOSTILE)}), encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_page_logs_nothing_requests_nothing_and_fits(browser, sample, size, scheme):
    visit = Visit(browser, sample, SIZES[size], color_scheme=scheme)
    assert visit.width() <= 0
    assert visit.page.title() == "FAIL · attncheck gate"
    assert len(visit.page.screenshot()) > 10_000
    visit.assert_silent_and_offline()


@pytest.mark.parametrize("size", SIZES)
def test_hostile_text_is_shown_and_inert(browser, hostile, size):
    visit = Visit(browser, hostile, SIZES[size])
    assert visit.width() <= 0
    assert visit.page.title() == "FAIL · attncheck gate"
    assert visit.page.locator("img, iframe, link, [onmouseover], [onerror]").count() == 0
    assert visit.page.locator("script").count() == 1
    assert HOSTILE[0] in visit.page.locator("main").inner_text()
    visit.assert_silent_and_offline()


def test_dark_scheme_is_dark(browser, sample):
    def brightness(scheme):
        visit = Visit(browser, sample, color_scheme=scheme)
        color = "getComputedStyle(document.body).backgroundColor"
        return sum(map(int, visit.page.evaluate(f"{color}.match(/\\d+/g)")[:3]))

    assert 4 * brightness("dark") < brightness("light")


def test_button_copies_the_command(browser, sample):
    visit = Visit(browser, sample)
    button = visit.page.locator("button[data-copies]").first
    button.click()
    # Not `wait_for_function`: the page's policy forbids functions made from text.
    visit.page.get_by_role("button", name=re.compile("Copied|Selected")).wait_for()
    visit.assert_silent_and_offline()


def failures(visit, *, shown):
    return visit.page.locator(f".failure:{'not([hidden])' if shown else 'is([hidden])'}").count()


@pytest.mark.parametrize("size", SIZES)
def test_filters_hide_other_failures(browser, sample, size):
    visit = Visit(browser, sample, SIZES[size])
    assert failures(visit, shown=False) == 0
    every = failures(visit, shown=True)
    visit.page.select_option("select[name=dtype]", "fp16")
    visit.page.select_option("select[name=stage]", "bounds")
    assert (failures(visit, shown=True), failures(visit, shown=False)) == (1, every - 1)
    assert visit.page.locator("output").inner_text() == f"{every - 1} of {every} failures hidden"
    visit.page.select_option("select[name=kernel]", "sdpa_flash")
    assert failures(visit, shown=True) == 0
    visit.page.get_by_text("Show all").click()
    assert failures(visit, shown=True) == every
    assert visit.width() <= 0
    visit.assert_silent_and_offline()


def test_link_opens_folded_section(browser, sample):
    visit = Visit(browser, sample)
    table = visit.page.get_by_text("head_dim=48 is not supported")
    assert not table.is_visible()
    visit.page.get_by_role("link", name="Not supported").click()
    table.wait_for()


def test_page_without_scripts_shows_everything_but_filters(browser, sample):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(sample.as_uri())
    assert not page.locator("#filters").is_visible()
    assert page.locator(".failure:not([hidden])").count() == 5
    page.get_by_text("not supported: 1 question").click()
    page.get_by_text("head_dim=48 is not supported").wait_for()
    context.close()


def test_policy_blocks_foreign_script_style_and_image(browser, sample, tmp_path):
    page = sample.read_text(encoding="utf-8")
    planted = page.replace("</main>", "<script>document.title = 'owned'</script></main>")
    planted = planted.replace(
        "<main>", '<main style="color:red"><img src="https://evil.example/x">'
    )
    (tmp_path / "planted.html").write_text(planted, encoding="utf-8")
    visit = Visit(browser, tmp_path / "planted.html")
    assert visit.page.title() == "FAIL · attncheck gate"
    assert len([text for text in visit.messages if "Content Security Policy" in text]) == 3


def test_width_check_detects_a_line_too_wide_for_a_phone(browser, sample, tmp_path):
    page = sample.read_text(encoding="utf-8")
    wide = page.replace("<main>", "<main><svg width='2000' height='9'></svg>")
    (tmp_path / "wide.html").write_text(wide, encoding="utf-8")
    assert Visit(browser, tmp_path / "wide.html", SIZES["phone"]).width() > 0
