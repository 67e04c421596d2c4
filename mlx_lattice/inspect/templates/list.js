// The rows of the page's list, which the field, the buttons of passes and the column
// heads filter and sort.
const rows = [...document.querySelectorAll("[data-text]")];
const passes = [...document.querySelectorAll("button[data-pass]")];
const find = document.getElementById("find");
function show() {
  const off = passes.filter(b => b.ariaPressed === "false").map(b => b.dataset.pass);
  const text = find.value.toLowerCase();
  for (const row of rows)
    row.hidden = off.includes(row.dataset.pass) ||
      !row.dataset.text.toLowerCase().includes(text);
}
find.addEventListener("input", show);
for (const button of passes) button.addEventListener("click", () => {
  button.ariaPressed = button.ariaPressed === "true" ? "false" : "true";
  show();
});
// A cell's value is its number, data-v, or its text. Rows without a value come last.
function value(row, at) {
  const cell = (row.querySelector("summary") ?? row).children[at];
  if (cell.dataset.v === undefined) return cell.textContent.trim().toLowerCase();
  return cell.dataset.v === "" ? null : Number(cell.dataset.v);
}
const heads = [...document.querySelectorAll("[role=columnheader]")];
heads.forEach((head, at) => head.querySelector("button").addEventListener("click", () => {
  const values = new Map(rows.map(row => [row, value(row, at)]));
  const numbers = [...values.values()].some(v => typeof v === "number");
  // First the largest numbers, or texts from A to Z; the second click turns it round.
  const was = head.getAttribute("aria-sort");
  const up = was ? was === "descending" : !numbers;
  for (const other of heads) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  rows.sort((a, b) => {
    const [x, y] = [values.get(a), values.get(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    const order = numbers ? x - y : x.localeCompare(y, "en", {numeric: true});
    return up ? order : -order;
  });
  rows[0]?.parentNode.append(...rows);
}));
