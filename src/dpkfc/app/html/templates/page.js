"use strict";
(() => {
  const say = (text) => { document.getElementById("status").textContent = text; };

  const boxes = [...document.querySelectorAll("[data-toggle]")];
  const show = () => {
    const hidden = new Set(boxes.filter((box) => !box.checked).map((box) => box.dataset.toggle));
    for (const element of document.querySelectorAll("[data-method]")) {
      element.toggleAttribute("hidden", hidden.has(element.dataset.method));
    }
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
  for (const button of document.querySelectorAll("#run-table thead button")) {
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

  document.documentElement.dataset.ready = "true";
})();
