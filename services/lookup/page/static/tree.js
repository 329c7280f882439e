// Draws a draft tree: nodes as boxes from left to right, the likeliest continuation on the first line of its branch.

const SVG = "http://www.w3.org/2000/svg";
const BOX = 26, ROW = 34, GAP = 30, PAD = 9, SHARE = 7;
const DRAWN = 512;

export const STEPS = 8;

/** The step of the colour scale for a probability: by its square root, because most nodes are unlikely. */
export const step = (prob) => Math.min(STEPS - 1, Math.floor(Math.sqrt(prob) * STEPS));

export const percent = (prob) =>
  prob >= 0.995 ? "100%" : prob >= 0.0995 ? `${Math.round(prob * 100)}%` : prob >= 0.01 ? `${(prob * 100).toFixed(1)}%` : "<1%";

function make(name, attributes = {}, text = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text; // never markup: a token may spell anything
  return element;
}

const pen = document.createElement("canvas").getContext("2d");
function measure(text, font) {
  pen.font = font;
  return Math.ceil(pen.measureText(text).width);
}

/** The indices from the first token to a node. */
export function path(nodes, index) {
  const found = [];
  for (let i = index; i >= 0; i = nodes[i].parent) found.unshift(i);
  return found;
}

/** Places for all nodes: a parent stands on the line of its likeliest child, every other child begins a line. */
function arrange(nodes, rootWidth, font, small) {
  const children = Array.from({ length: nodes.length + 1 }, () => []);
  nodes.forEach((node, i) => children[node.parent + 1].push(i));
  const places = nodes.map((node) => {
    const label = measure(node.shown, font), share = percent(node.prob);
    return { label, share, width: label + SHARE + measure(share, small) + 2 * PAD, x: 0, y: 0 };
  });
  let rows = 0, right = rootWidth;
  const open = children[0].slice().reverse().map((i) => [i, rootWidth, false]);
  let first = true;
  while (open.length) {
    const [i, left, follows] = open.pop();
    if (!follows && !first) rows += 1;
    first = false;
    const place = places[i];
    place.x = left + GAP;
    place.y = rows * ROW;
    right = Math.max(right, place.x + place.width);
    const below = children[i + 1];
    for (let k = below.length - 1; k >= 0; k--) open.push([below[k], place.x + place.width, k === 0]);
  }
  return { places, width: right + 4, height: rows * ROW + BOX + 4, children };
}

/** Draw into `host`; `on` is called for a node that is pointed at (`show`, `hide`) or chosen (`choose`). */
export function draw(host, draft, on) {
  const nodes = draft.nodes.slice(0, DRAWN);
  const style = getComputedStyle(host), family = style.getPropertyValue("--mono");
  const font = `13px ${family}`, small = `10px ${family}`;
  const last = "…" + draft.context.slice(-3).map((token) => token.shown).join("");
  const rootText = last.length > 18 ? "…" + last.slice(-17) : last;
  const rootWidth = measure(rootText, font) + 2 * PAD;
  const { places, width, height, children } = arrange(nodes, rootWidth, font, small);
  const svg = make("svg", { width, height, viewBox: `-2 -2 ${width} ${height}`, role: "tree", "aria-label": "Draft tree" });
  const root = make("g", { class: "root" });
  root.append(
    make("rect", { width: rootWidth, height: BOX, rx: 6 }),
    make("text", { x: PAD, y: 17.5 }, rootText),
  );
  const edges = nodes.map((node, i) => {
    const to = places[i], from = node.parent < 0 ? { x: 0, y: 0, width: rootWidth } : places[node.parent];
    const x = from.x + from.width, y = from.y + BOX / 2, end = to.y + BOX / 2, middle = x + GAP / 2;
    const curve = y === end ? `M${x} ${y}H${to.x}` : `M${x} ${y}C${middle} ${y} ${x + 4} ${end} ${to.x} ${end}`;
    return make("path", { class: "edge", d: curve, "stroke-width": (1 + 5 * Math.sqrt(node.prob)).toFixed(2) });
  });
  const boxes = nodes.map((node, i) => {
    const { x, y, width: w, label, share } = places[i];
    const box = make("g", {
      class: `node p${step(node.prob)}`, transform: `translate(${x} ${y})`, role: "treeitem", tabindex: i ? -1 : 0,
      "data-index": i, "aria-label": `${node.shown}, probability ${percent(node.prob)}, rank ${i + 1}`,
    });
    box.append(
      make("rect", { width: w, height: BOX, rx: 6 }),
      make("text", { x: PAD, y: 17.5 }, node.shown),
      make("text", { class: "share", x: PAD + label + SHARE, y: 17 }, share),
    );
    return box;
  });
  svg.append(...edges, root, ...boxes);
  const frame = document.createElement("div"); // an <svg> that listens to keys would take the focus itself
  frame.append(svg);
  listen(frame, nodes, boxes, edges, children, on);
  host.replaceChildren(frame);
  return nodes.length;
}

function listen(frame, nodes, boxes, edges, children, on) {
  const indexOf = (event) => {
    const box = event.target.closest(".node");
    return box ? Number(box.dataset.index) : -1;
  };
  const light = (index) => {
    const lit = new Set(index < 0 ? [] : path(nodes, index));
    boxes.forEach((box, i) => box.classList.toggle("on", lit.has(i)));
    edges.forEach((edge, i) => edge.classList.toggle("on", lit.has(i)));
    if (index < 0) on.hide();
    else on.show(index, boxes[index]);
  };
  const go = (index) => {
    if (index === undefined || index < 0) return;
    boxes.forEach((box, i) => box.setAttribute("tabindex", i === index ? 0 : -1));
    boxes[index].focus();
    boxes[index].scrollIntoView({ block: "nearest", inline: "nearest" });
  };
  const lines = boxes.map((_, i) => i).sort((a, b) => placeOf(boxes[a]) - placeOf(boxes[b]) || a - b);
  frame.addEventListener("pointerover", (event) => light(indexOf(event)));
  frame.addEventListener("pointerleave", () => light(-1));
  frame.addEventListener("focusin", (event) => light(indexOf(event)));
  frame.addEventListener("focusout", () => light(-1));
  frame.addEventListener("click", (event) => indexOf(event) >= 0 && on.choose(indexOf(event)));
  frame.addEventListener("keydown", (event) => {
    const index = indexOf(event);
    if (index < 0) return;
    const siblings = children[nodes[index].parent + 1], place = siblings.indexOf(index);
    const step = {
      ArrowRight: () => go(children[index + 1][0]),
      ArrowLeft: () => go(nodes[index].parent),
      ArrowDown: () => go(siblings[place + 1] ?? lines[lines.indexOf(index) + 1]),
      ArrowUp: () => go(siblings[place - 1] ?? lines[lines.indexOf(index) - 1]),
      Home: () => go(0),
      Enter: () => on.choose(index),
      " ": () => on.choose(index),
      Escape: () => light(-1),
    }[event.key];
    if (step) { event.preventDefault(); step(); }
  });
}

const placeOf = (box) => Number(box.getAttribute("transform").match(/ ([\d.]+)\)/)[1]);
