"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set();
  const drawn = new Set();
  const say = (text) => { document.getElementById("status").textContent = text; };
  const narrow = () => window.innerWidth < 600;

  const paint = () => {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(name).trim();
    return { ink: value("--ink"), muted: value("--muted"), line: value("--line"), paper: value("--paper") };
  };

  const layoutOf = (figure) => {
    const colour = paint();
    const font = { color: colour.ink, family: getComputedStyle(document.body).fontFamily, size: narrow() ? 12 : 13 };
    const axis = (own) => ({
      ...own, title: { ...own.title, font }, gridcolor: colour.line, linecolor: colour.line, tickcolor: colour.line, fixedrange: narrow(),
    });
    const made = {
      ...figure.layout, font, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: figure.height, autosize: true,
      xaxis: axis(figure.layout.xaxis), yaxis: axis(figure.layout.yaxis),
      hoverlabel: { bgcolor: colour.paper, bordercolor: colour.line, font: { ...font, size: 13 }, align: "left" },
    };
    return made;
  };

  const tracesOf = (figure) => figure.data.map((trace) => ({ ...trace, visible: !hidden.has(trace.meta) }));

  const config = {
    responsive: true, displaylogo: false, displayModeBar: false, showTips: false,
  };

  const draw = (place) => {
    if (!(place.id in figures) || drawn.has(place.id)) return;
    drawn.add(place.id);
    Plotly.newPlot(place, tracesOf(figures[place.id]), layoutOf(figures[place.id]), config);
  };

  const again = () => {
    for (const id of drawn) Plotly.react(id, tracesOf(figures[id]), layoutOf(figures[id]), config);
  };

  const isOpen = (element) => {
    const around = element.parentElement.closest("details");
    return around === null || (around.open && isOpen(around));
  };
  const drawOpen = (root) => {
    for (const place of root.querySelectorAll(".plot")) if (isOpen(place)) draw(place);
  };
  for (const details of document.querySelectorAll("details")) {
    details.addEventListener("toggle", () => { if (details.open) drawOpen(details); });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);

  const boxes = [...document.querySelectorAll("[data-toggle]")];
  const show = () => {
    hidden.clear();
    for (const box of boxes) if (!box.checked) hidden.add(Number(box.dataset.toggle));
    for (const element of document.querySelectorAll("[data-method]")) element.hidden = hidden.has(Number(element.dataset.method));
    again();
    say(`${boxes.length - hidden.size} of ${boxes.length} methods shown`);
  };
  for (const box of boxes) box.addEventListener("change", show);
  for (const [id, checked] of [["all", true], ["none", false]]) {
    document.getElementById(id)?.addEventListener("click", () => { for (const box of boxes) box.checked = checked; show(); });
  }

  const key = (row, column, numeric) => {
    const cell = row.cells[column];
    if (!numeric) return (cell.dataset.text ?? cell.textContent).trim().toLowerCase();
    return cell.dataset.value === "" ? null : Number(cell.dataset.value);
  };
  const sort = (heading) => {
    const table = heading.closest("table"), body = table.tBodies[0];
    const column = heading.cellIndex, numeric = heading.dataset.kind === "number";
    const up = heading.getAttribute("aria-sort") !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const rows = [...body.rows].map((row) => [key(row, column, numeric), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      const order = numeric ? a - b : a.localeCompare(b);
      return up ? order : -order;
    });
    for (const [, row] of rows) body.append(row);
    say(`sorted by ${heading.textContent.trim()}, ${up ? "ascending" : "descending"}`);
  };
  for (const button of document.querySelectorAll("#table thead button")) {
    button.addEventListener("click", () => sort(button.closest("th")));
  }

  const copy = async (button) => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      document.execCommand("copy");
    }
    button.textContent = "copied";
    say("copied");
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  };
  for (const button of document.querySelectorAll("button.copy")) button.addEventListener("click", () => copy(button));

  drawOpen(document);
  document.documentElement.dataset.ready = "true";
})();
