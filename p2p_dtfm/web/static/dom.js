// Making elements. Text is always set as text: much of it comes from other peers.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element with properties, and children that are nodes or text. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "hue") made.style.setProperty("--hue", value);
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** An SVG element with attributes; `title` becomes its tooltip. */
export function drawing(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "hue") made.style.setProperty("--hue", value);
    else if (name === "title") made.append(titled(value));
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function titled(text) {
  const title = document.createElementNS(SVG, "title");
  title.textContent = text;
  return title;
}

/**
 * Gives a node these children, and leaves alone what is there as it is to be. Much is drawn each
 * second: words that somebody has just selected must stay selected, and stay to be read aloud.
 * Not for what listens: that would go on with what it was made for.
 */
export function fill(node, ...children) {
  const wanted = children.filter((child) => child !== null && child !== undefined)
    .map((child) => (child instanceof Node ? child : document.createTextNode(child)));
  wanted.forEach((child, at) => {
    const there = node.childNodes[at];
    if (!there) node.append(child);
    else if (there.isEqualNode(child)) return;
    else if (there.cloneNode(false).isEqualNode(child.cloneNode(false))) fill(there, ...child.childNodes);
    else there.replaceWith(child);
  });
  while (node.childNodes.length > wanted.length) node.lastChild.remove();
}

/** The same of a node that holds one text. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const byId = (id) => document.getElementById(id);

/** Calls `draw(width, height)` soon and whenever the element's size changes. */
export function onSize(node, draw) {
  let [width, height] = [0, 0];
  new ResizeObserver(() => {
    if (!node.clientWidth || (node.clientWidth === width && node.clientHeight === height)) return;
    [width, height] = [node.clientWidth, node.clientHeight];
    draw(width, height);
  }).observe(node);
}

/** Calls `draw(width)` soon and whenever the element's width changes. */
export function onWidth(node, draw) {
  let width = 0;
  onSize(node, (now) => {
    if (now !== width) draw((width = now));
  });
}

/** Fills a legend: pairs of a swatch's class and its text. */
export function legend(list, items) {
  fill(list,
    ...items.map(([kind, text]) =>
      element("li", {}, element("span", { className: `swatch ${kind}` }), text),
    ),
  );
}

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

/** Many things alike are one stop of the tab key: arrow keys go from one to the next. */
export function oneStop(room, nodes, first = 0) {
  nodes.forEach((node, at) => node.setAttribute("tabindex", at === first ? 0 : -1));
  room.addEventListener("keydown", (event) => {
    const at = nodes.indexOf(event.target);
    if (at < 0 || !(event.key in STEPS)) return;
    event.preventDefault();
    const next = nodes[(at + STEPS[event.key] + nodes.length) % nodes.length];
    nodes[at].setAttribute("tabindex", -1);
    next.setAttribute("tabindex", 0);
    next.focus();
  });
}

const pen = document.createElement("canvas").getContext("2d");

/** Pixels that a text takes in the page's letters, of a weight and size such as "600 12px". */
export function textWidth(text, font) {
  pen.font = `${font} ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

/** The text, or as much of its beginning as so many pixels hold. */
export function fitted(text, room, font) {
  if (textWidth(text, font) <= room) return text;
  const letters = [...text.replace(/…$/u, "")];
  while (letters.length > 1 && textWidth(`${letters.join("")}…`, font) > room) letters.pop();
  return `${letters.join("")}…`;
}
