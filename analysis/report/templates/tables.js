// Sorts a table when a column head is clicked: figures by value, unknown values last.
"use strict";
document.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => {
  const head = button.parentElement;
  const table = head.closest("table");
  const ascending = head.ariaSort === "descending" || (head.ariaSort === "none" && !head.classList.contains("number"));
  table.querySelectorAll("th").forEach((other) => { other.ariaSort = "none"; });
  head.ariaSort = ascending ? "ascending" : "descending";
  const value = (row) => {
    const cell = row.cells[head.cellIndex];
    return cell.dataset.value === undefined ? cell.textContent : cell.dataset.value === "" ? null : Number(cell.dataset.value);
  };
  const body = table.tBodies[0];
  const rows = [...body.rows].sort((rowA, rowB) => {
    const [a, b] = [value(rowA), value(rowB)];
    if (a === null || b === null) return (a === null) - (b === null);
    const order = typeof a === "number" ? a - b : a.localeCompare(b);
    return ascending ? order : -order;
  });
  body.append(...rows);
}));
