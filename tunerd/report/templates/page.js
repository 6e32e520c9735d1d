"use strict";
// Shows what a mark of a plot says beside the pointer. Without this script browsers show the same
// <title> elements by themselves, later and plainer. Texts are only ever set as text.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const said = new WeakMap();
  for (const title of document.querySelectorAll("svg title")) {
    said.set(title.parentNode, title.textContent);
    title.remove();
  }
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.dir = "auto";
  tip.setAttribute("role", "tooltip");
  tip.hidden = true;
  document.body.append(tip);
  let lit = null;

  function light(mark) {
    if (lit === mark) return;
    lit?.classList.remove("on");
    lit = mark;
    lit?.classList.add("on");
  }

  function hide() {
    tip.hidden = true;
    light(null);
  }

  function show(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const width = document.documentElement.clientWidth;
    const left = Math.min(Math.max(8, x - box.width / 2), width - box.width - 8);
    const above = y - box.height - 14;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above < 4 ? y + 18 : above}px`;
  }

  function place(mark, box) {
    const dot = mark.querySelector(".point");
    return [
      box.left + (parseFloat(dot.getAttribute("cx")) / 100) * box.width,
      box.top + parseFloat(dot.getAttribute("cy")),
    ];
  }

  // A line's points are few and thin: the nearest one answers, wherever the pointer is.
  function nearest(chart, x, y) {
    const box = chart.getBoundingClientRect();
    let found = null;
    let least = Infinity;
    for (const mark of chart.querySelectorAll(".found")) {
      const [left, top] = place(mark, box);
      const distance = Math.hypot(left - x, (top - y) / 3);
      if (distance < least) [found, least] = [mark, distance];
    }
    return found;
  }

  function tell(mark, chart) {
    light(mark);
    const box = chart.getBoundingClientRect();
    const [x, y] = place(mark, box);
    let rule = chart.querySelector(".cross");
    if (!rule) {
      rule = document.createElementNS(SVG, "line");
      rule.setAttribute("class", "cross");
      rule.setAttribute("y1", "0");
      rule.setAttribute("y2", chart.querySelector(".axis").getAttribute("y1"));
      chart.append(rule);
    }
    rule.setAttribute("x1", x - box.left);
    rule.setAttribute("x2", x - box.left);
    show(said.get(mark), x, y);
  }

  function at(event) {
    const chart = event.target.closest?.("svg.chart");
    if (chart) {
      const mark = nearest(chart, event.clientX, event.clientY);
      if (mark) return tell(mark, chart);
    }
    for (let node = event.target; node instanceof Element; node = node.parentNode) {
      if (said.has(node)) {
        light(null);
        return show(said.get(node), event.clientX, event.clientY);
      }
    }
    return hide();
  }

  document.addEventListener("pointermove", at);
  document.addEventListener("pointerdown", at);
  document.addEventListener("pointerleave", hide);
  document.addEventListener("scroll", hide, { passive: true, capture: true });

  // A table that is wider than its place is scrolled by keys, too.
  const sized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (target.scrollWidth > target.clientWidth) target.setAttribute("tabindex", "0");
      else target.removeAttribute("tabindex");
    }
  });
  for (const box of document.querySelectorAll(".scroll")) sized.observe(box);

  // The arrow keys walk along the line of a plot that has the focus.
  for (const chart of document.querySelectorAll("svg.chart")) chart.setAttribute("tabindex", "0");
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const chart = document.activeElement?.closest("svg.chart");
    if (!step || !chart) return undefined;
    const marks = [...chart.querySelectorAll(".found")];
    if (!marks.length) return undefined;
    event.preventDefault();
    const now = marks.indexOf(lit);
    const next = now < 0 ? (step > 0 ? 0 : marks.length - 1) : now + step;
    return tell(marks[Math.min(marks.length - 1, Math.max(0, next))], chart);
  });
})();
