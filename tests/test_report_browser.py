"""The report in headless Chromium: the slider, what it reads off, keyboard, widths, and not one request."""

import re
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
from report_pages import EVIL, FLOORS, Evil, made, small_sweep

import specsim as ss
from specsim.cli.tables import gain_tables
from specsim.pareto import pareto, sla_table

pytest.importorskip("vl_convert", reason="the extra report is not installed")
api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
PATIENCE = 120_000  # ms: a busy machine is no failure


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def swept():
    return small_sweep()


@pytest.fixture(scope="module")
def file(swept, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "page.html"
    path.write_text(made(swept), encoding="utf-8")
    return path


@contextmanager
def opened(browser, file, **options):
    """The page once its charts are drawn; at the end it has asked for nothing and complained of nothing."""
    context = browser.new_context(**{"viewport": {"width": 900, "height": 800}} | options)
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    asked, complaints = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    yield page
    page.wait_for_timeout(50)
    assert complaints == []
    assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()]
    context.close()


def slide(page, floor):
    page.locator("#floor").evaluate(
        "(s, v) => { s.value = v; s.dispatchEvent(new Event('input', {bubbles: true})); }", str(floor)
    )
    return sold(page)


def sold(page):
    """The table of what is sold at the floor: a row of texts a scheduler."""
    rows = page.locator("table.sold tbody tr").evaluate_all(
        "rows => rows.map(r => [...r.cells].map(c => c.textContent))"
    )
    return [[cell.replace("\u00a0", " ") for cell in row] for row in rows]


def verdict(page):
    page.wait_for_timeout(250)
    return page.locator("#verdict").text_content()


def test_the_slider_reads_off_what_the_command_line_prints(browser, file, swept):
    front = pareto(swept["frame"])
    floors = [0.05, *FLOORS, 1.1, 1.8]
    table = sla_table(front, floors)
    assert {text[0] for text in table["text"]} >= {"≥", "–", "1"}
    with opened(browser, file) as page:
        for floor in floors:
            texts = table.loc[table["floor"] == floor, "text"].tolist()
            assert [row[1] for row in slide(page, floor)] == texts, floor
            assert page.locator("#floor-value").text_content() == f"{floor:g} tok/s per user"
            assert page.locator("#floor").get_attribute("aria-valuetext") == f"{floor:g} tokens per second and user"
        at = table[table["floor"] == 1.8].set_index("policy")["throughput"]
        assert f"At 1.8 tok/s per user, {at.idxmax()} sells the most" in verdict(page)
        slide(page, 0.95)
        assert "sells at least" in verdict(page)
        assert "Might sell as much or more, their loads end above this floor: Threshold(0.5)" in verdict(page)
        end = slide(page, page.locator("#floor").get_attribute("max"))
        assert any(row[1] != "–" for row in end)
        assert "sells the most" in verdict(page)


def test_users_and_gpus_follow_the_demand(browser, file, swept):
    users = swept["frame"].assign(users=swept["frame"]["load"] / 2)  # two GPUs a replica
    readings = sla_table(pareto(users, y="users"), [1.5])
    waits = pareto(swept["frame"]).points.set_index(["policy", "load"])["ttft_p50"]
    with opened(browser, file) as page:
        page.locator("#demand").fill("30")
        for row, (_, expected) in zip(slide(page, 1.5), readings.iterrows(), strict=True):
            if expected["throughput"] > 0:
                assert float(row[3]) == pytest.approx(expected["throughput"], rel=5e-3)
                whole = -(-30 // (2 * expected["throughput"])) * 2
                assert row[4] == f"{whole:.0f}"
            else:
                assert row[3:] == (["–", "–", "–"] if expected["text"] == "–" else row[3:])
            load = 2 * expected["throughput"]
            if load > 0:
                mine = waits[expected["policy"]]
                wait = float(np.interp(load, mine.index, mine)) * 1000
                assert row[5].startswith(f"{wait:.3g} ms p90 " if wait < 1000 else f"{wait / 1000:.3g} s p90 ")
        assert "30 users need" in verdict(page)
        waits = r"GPUs and then wait [\d.]+ m?s for the first token \(median, 90th percentile [\d.]+ m?s\)\."
        assert re.search(waits, verdict(page))
        page.locator("#demand").fill("1")
        assert re.search("; 1 user needs (at most )?2 GPUs and then waits ", verdict(page))
        page.locator("#demand").fill("")
        assert {row[4] for row in sold(page)} == {"–"}


@pytest.mark.parametrize("typed", ["0", "", "1e30", "-5", "2.5", "1000000001"])
def test_what_is_no_number_of_users_is_told(browser, file, typed):
    with opened(browser, file) as page:
        field, problem = page.locator("#demand"), page.locator("#demand-problem")
        assert not problem.is_visible()
        field.fill(typed)
        assert problem.text_content() == "GPUs need a whole number of users, from 1 to 1,000,000,000."
        assert problem.get_attribute("aria-live") == "polite"
        assert field.get_attribute("aria-invalid") == "true"
        assert {row[4] for row in slide(page, 1.3)} == {"–"}
        assert "users need" not in verdict(page)
        field.fill("1000000000")
        assert not problem.is_visible()
        assert field.get_attribute("aria-invalid") == "false"
        assert "1,000,000,000 users need" in verdict(page)


def test_gains_are_the_command_lines(browser, swept, tmp_path):
    front = pareto(swept["frame"])
    path = tmp_path / "page.html"
    shown = set()
    for base in front.policies[:2]:
        path.write_text(made(swept, base_policy=base), encoding="utf-8")
        with opened(browser, path) as page:
            for floor in (0.95, 1.3, 1.5, 1.8):
                gains = next(iter(gain_tables(sla_table(front, [floor], base), base, 180)), None)
                expected = dict(zip(*(column.cells for column in gains.columns), strict=True)) if gains else {}
                for row in slide(page, floor):
                    name = next(p for p in front.policies if row[0].startswith(p))
                    assert row[2] == expected.get(name, "–").removesuffix(" %")
                    shown.add(row[2][0])
    assert {"≥", "–", "−"} <= shown


def test_the_tab_key_goes_through_the_page_and_shows_where_it_is(browser, file):
    """Every stop has an outline and is on the screen; tables that do not scroll are no stops."""
    at = """() => { const e = document.activeElement, s = getComputedStyle(e), r = e.getBoundingClientRect();
      const scrolls = e.scrollWidth > e.clientWidth || e.scrollHeight > e.clientHeight;
      return [e.id || e.className || e.tagName, s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 1,
              r.bottom > 0 && r.top < innerHeight && r.right > 0, !e.classList.contains('scroll') || scrolls]; }"""
    with opened(browser, file, viewport={"width": 375, "height": 800}, reduced_motion="reduce") as page:
        page.evaluate("document.querySelectorAll('details').forEach(d => (d.open = true))")
        page.wait_for_timeout(50)
        stops = []
        while True:
            page.keyboard.press("Tab")
            name, outlined, seen, meant = page.evaluate(at)
            if name == "BODY" or len(stops) > 80:
                break
            assert (outlined, seen, meant) == (True, True, True), name
            stops.append(name)
        assert {"skip", "floor", "demand", "BUTTON", "INPUT", "SUMMARY", "scroll"} <= set(stops)
        boxes = page.locator(".scroll").evaluate_all("es => es.filter(e => e.scrollWidth > e.clientWidth).length")
        assert stops.count("scroll") >= boxes > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1600])
def test_axe_finds_nothing(browser, file, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}

    def found(page):
        return [(v["id"], v["nodes"][0]["html"]) for v in axe.Axe().run(page, options=rules).response["violations"]]

    with opened(browser, file, viewport={"width": width, "height": 800}, color_scheme=scheme) as page:
        page.evaluate("document.querySelectorAll('details').forEach(d => (d.open = true))")
        page.locator("#demand").fill("0")  # the message too
        verdict(page)
        assert found(page) == []
        page.evaluate("document.querySelector('label[for=floor]').remove()")
        rules["runOnly"] = ["label"]
        assert [rule for rule, _ in found(page)] == ["label"]  # it looks


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_written_stands_out(browser, file, scheme):
    """WCAG's 4.5 for text, on every ground that it may have, and 3 for the edges of what can be operated."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(share * p for share, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    with opened(browser, file, color_scheme=scheme) as page:
        for ink, grounds, least in (
            ("ink", ("paper", "wash", "warn-wash"), 4.5), ("muted", ("paper", "wash"), 4.5),
            ("link", ("paper", "wash"), 4.5), ("warn", ("paper", "wash"), 4.5), ("edge", ("paper", "wash"), 3),
        ):  # fmt: skip
            read = "n => getComputedStyle(document.body).getPropertyValue('--' + n).trim()"
            for ground in grounds:
                low, high = sorted(luminance(page.evaluate(read, name)) for name in (ink, ground))
                assert (high + 0.05) / (low + 0.05) >= least, (ink, ground)


def test_keys_move_the_slider_and_buttons_set_it(browser, file):
    with opened(browser, file) as page:
        page.get_by_role("button", name="1.5 tokens per second and user").click()
        assert page.locator("#floor-value").text_content() == "1.5 tok/s per user"
        assert page.get_by_role("button", pressed=True).text_content() == "1.5"
        page.get_by_role("slider", name="Interactivity floor").focus()
        page.keyboard.press("ArrowRight")
        step = float(page.locator("#floor").get_attribute("step"))
        assert page.locator("#floor-value").text_content() == f"{1.5 + step:g} tok/s per user"
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.dataset.floor") == f"{FLOORS[0]:g}"


def test_the_chart_shows_the_floor_and_what_a_pointer_meets(browser, file, swept):
    with opened(browser, file) as page:
        chart = page.locator("[data-chart=front]")
        before = chart.locator("g.mark-rule line").last.evaluate("e => e.getBoundingClientRect().x")
        slide(page, FLOORS[-1])
        page.wait_for_timeout(200)
        assert chart.locator("g.mark-rule line").last.evaluate("e => e.getBoundingClientRect().x") > before
        assert chart.get_attribute("aria-label").startswith("Throughput per GPU against interactivity")
        point = chart.locator("g.mark-symbol path[aria-roledescription=point]").first
        point.scroll_into_view_if_needed()
        box = point.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        tip = page.locator("#vg-tooltip-element.visible").text_content()
        for words in ("Scheduler", "Users", "Throughput", "tok/s per GPU", "Interactivity", "τ"):
            assert words in tip


def test_the_others_fade_beside_the_scheduler_pointed_at(browser, file):
    faint = "es => es.filter(e => Number(getComputedStyle(e).opacity) < 0.5).length"
    with opened(browser, file) as page:

        def faded(chart):
            page.wait_for_timeout(150)
            return page.locator(f"[data-chart={chart}] g.mark-line path").evaluate_all(faint)

        def everywhere():
            return {faded(chart) for chart in ("front", "throughput", "ttft")}

        names = page.locator("button.name")
        assert everywhere() == {0}
        names.nth(1).hover()
        assert everywhere() == {2}
        page.mouse.move(0, 0)
        assert everywhere() == {0}
        page.locator("#latency .key li").nth(2).hover()
        assert everywhere() == {2}
        page.mouse.move(0, 0)
        names.nth(0).focus()
        assert everywhere() == {2}
        names.nth(0).press("Enter")  # it stays so
        names.nth(0).evaluate("e => e.blur()")
        assert names.nth(0).get_attribute("aria-pressed") == "true"
        assert everywhere() == {2}
        names.nth(0).click()
        names.nth(0).evaluate("e => e.blur()")
        page.mouse.move(0, 0)
        assert everywhere() == {0}
        point = page.locator("[data-chart=front] g.mark-symbol path[aria-roledescription=point]").first
        point.scroll_into_view_if_needed()
        box = point.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        assert everywhere() == {2}


def test_names_break_between_their_parts_alone(browser, swept, tmp_path):
    path = tmp_path / "names.html"
    frame = swept["frame"].assign(policy=swept["frame"]["policy"].replace({"NoSpec()": "DSparkGreedy()"}))
    path.write_text(made(swept, frame), encoding="utf-8")
    lines = """e => { const r = document.createRange(), found = [];
      const t = document.createTreeWalker(e, NodeFilter.SHOW_TEXT);
      for (let n = t.nextNode(); n; n = t.nextNode()) for (let i = 0; i < n.length; i++) {
        r.setStart(n, i); r.setEnd(n, i + 1); const y = r.getBoundingClientRect().top;
        if (!found.length || Math.abs(y - found.at(-1)[0]) > 4) found.push([y, '']);
        found.at(-1)[1] += n.data[i]; }
      return found.map((f) => f[1]); }"""
    with opened(browser, path, viewport={"width": 375, "height": 800}) as page:
        for name in page.locator("button.name > span, #read-off > .scroll th[scope=row], .key li > span").all():
            if name.is_visible():
                assert all(line[0] in "(@" for line in name.evaluate(lines)[1:]), name.text_content()
        base = page.locator(".sold thead th").nth(2).evaluate(lines)  # % against DSparkGreedy()
        assert all(line.strip() != ")" and not line.endswith("(") for line in base), base


def test_an_open_loop_asks_for_requests_a_second(browser, tmp_path):
    swept = small_sweep(workloads=[ss.Poisson(r, 40, 8, 12) for r in (0.02, 0.05)], seeds=1)
    path = tmp_path / "open.html"
    path.write_text(made(swept, demand=0.5), encoding="utf-8")
    with opened(browser, path) as page:
        page.get_by_label("Requests/s to serve").fill("1.5")
        rows = slide(page, 0)
        assert "1.5 requests/s need" in verdict(page)
        for row in rows:
            per_gpu = float(row[3].removeprefix("≥ "))
            assert int(row[4].removeprefix("≤ ")) == pytest.approx(1.5 / per_gpu, abs=2.5)
        page.get_by_label("Requests/s to serve").fill("0")
        assert page.locator("#demand-problem").text_content().startswith("GPUs need a number of requests/s above 0")


def test_percentiles_are_chosen_by_radio_buttons(browser, file):
    with opened(browser, file) as page:
        where = "[data-chart=ttft] g.mark-line path"
        before = page.locator(where).evaluate_all("paths => paths.map(p => p.getAttribute('d')).join()")
        page.get_by_label("99th percentile").check()
        page.wait_for_timeout(200)
        assert page.locator(where).evaluate_all("paths => paths.map(p => p.getAttribute('d')).join()") != before


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 900, 1600])
def test_it_fits_every_width_and_both_schemes(browser, file, width, scheme):
    with opened(browser, file, viewport={"width": width, "height": 800}, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        tables = "[...document.querySelectorAll('table.sold, #read-off > .scroll > table')].map(e => e.parentElement)"
        assert page.evaluate(f"{tables}.length") == 2  # what is read off at the floors is seen whole
        assert not page.evaluate(f"{tables}.some(e => e.scrollWidth > e.clientWidth)")
        assert page.locator("table.sold tbody td:visible").count() == (4 if width == 375 else 5) * 3
        small = "e => Math.min(e.getBoundingClientRect().height, e.getBoundingClientRect().width)"
        for target in page.locator("nav a, .radios label, button, summary, input:not([type=radio])").all():
            if target.is_visible():
                assert target.evaluate(small) >= 24, target.evaluate("e => e.outerHTML")
        # What folds is open where there is room.
        assert page.locator("details.fold dl:visible").count() == (0 if width == 375 else 6)
        inked = "getComputedStyle(document.body).getPropertyValue('--paper').trim()"
        assert (page.evaluate(inked) == "#ffffff") == (scheme == "light")
        for box in page.locator("[data-chart]").all():
            assert 100 < box.locator("svg").bounding_box()["width"] <= width
        axis = page.locator("[data-chart=front] .role-axis-label text").first
        colour = axis.evaluate("e => getComputedStyle(e).fill")
        assert colour == {"light": "rgb(89, 95, 102)", "dark": "rgb(166, 173, 181)"}[scheme]


def test_long_names_and_numbers_fit_a_telephone(browser, swept, tmp_path):
    names = {"NoSpec()": "DSparkGreedy()", "Threshold(0.5)": "StaticGamma(3)"}
    frame = swept["frame"]
    large = frame.assign(
        policy=frame["policy"].replace(names), throughput=2000 * frame["throughput"],
        interactivity_p50=100 * frame["interactivity_p50"], ttft_p50=0.0206, ttft_p90=0.0413,
    )  # fmt: skip
    path = tmp_path / "large.html"
    path.write_text(made(swept, large, floors=[50, 95, 130]), encoding="utf-8")
    with opened(browser, path, viewport={"width": 375, "height": 800}) as page:
        for floor in (1, 50, 95, 130, 150, 180):
            assert slide(page, floor)[0][5] in ("20.6 ms p90 41.3 ms", "–")
            assert not page.locator("table.sold").evaluate(
                "e => e.parentElement.scrollWidth > e.parentElement.clientWidth"
            )


def test_print_is_light_whatever_the_screen_is(browser, file):
    with opened(browser, file, color_scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.body).getPropertyValue('--paper').trim()") == "#ffffff"
        assert not page.locator("#floor").is_visible()
    with opened(browser, file, viewport={"width": 375, "height": 800}) as page:
        page.emulate_media(media="print")
        page.wait_for_timeout(100)
        assert page.locator("details.fold dl:visible").count() == 6  # paper has no more room, but cannot be unfolded
        page.emulate_media(media="screen")
        page.wait_for_timeout(100)
        assert page.locator("details.fold dl:visible").count() == 0


def test_a_name_that_is_markup_does_nothing(browser, tmp_path):
    path = tmp_path / "evil.html"
    path.write_text(made(small_sweep(Evil(), seeds=2), notes=[EVIL]), encoding="utf-8")
    with opened(browser, path) as page:
        slide(page, 1.3)
        assert page.locator("img").count() == 0
        assert "hit" not in page.title()
        assert EVIL in page.locator("table.sold").text_content()
        chart = page.locator("[data-chart=front]")
        for point in chart.locator("g.mark-symbol path[aria-roledescription=point]").all()[-3:]:
            point.scroll_into_view_if_needed()
            box = point.bounding_box()
            page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            assert page.locator("#vg-tooltip-element img").count() == 0
