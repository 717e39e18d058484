"use strict";
for (const button of document.querySelectorAll("button[data-copies]")) {
  const source = document.getElementById(button.dataset.copies);
  button.hidden = false;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(source);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}
const filters = document.getElementById("filters");
if (filters) {
  const chosen = [...filters.querySelectorAll("select")];
  const items = [...document.querySelectorAll("[data-facets]")].map(
    (item) => [item, JSON.parse(item.dataset.facets)]);
  const show = () => {
    let hidden = 0;
    for (const [item, facets] of items) {
      item.hidden = chosen.some(
        ({ name, value }) => value && facets[name] && !facets[name].includes(value));
      hidden += item.hidden && item.matches(".failure");
    }
    filters.querySelector("output").textContent = hidden
      ? `${hidden} of ${document.querySelectorAll(".failure").length} failures hidden` : "";
  };
  filters.hidden = false;
  filters.addEventListener("input", show);
  filters.querySelector("button").addEventListener("click", () => {
    for (const select of chosen) select.value = "";
    show();
  });
  // A browser keeps what was chosen when the page is loaded again.
  show();
}
// A link to what is folded opens it.
const unfold = () => {
  const there = location.hash && document.getElementById(location.hash.slice(1));
  if (there) there.querySelector("details")?.setAttribute("open", "");
};
addEventListener("hashchange", unfold);
unfold();
