// What changes, moves: a shape that carries a key glides from where it was to where it is. Nothing else is animated.

const still = () => globalThis.matchMedia?.("(prefers-reduced-motion: reduce)").matches;

/** Where each shape with a key is now, within `picture`: {key: {left, top, width, height}}. */
export function places(picture) {
  const origin = picture.getBoundingClientRect(), found = new Map();
  for (const node of picture.querySelectorAll("[data-key]")) {
    const { left, top, width, height } = node.getBoundingClientRect();
    found.set(node.dataset.key, { left: left - origin.left, top: top - origin.top, width, height });
  }
  return found;
}

/** Each shape glides, within `ms`, from its place in `before` to its own; one that was not there fades in. */
export function glide(picture, before, ms) {
  if (still()) return;
  const after = places(picture), timing = { duration: Math.min(350, 0.85 * ms), easing: "ease-in-out" };
  for (const node of picture.querySelectorAll("[data-key]")) {
    const was = before.get(node.dataset.key), is = after.get(node.dataset.key);
    if (!was) {
      node.animate({ opacity: [0, 1] }, timing);
      continue;
    }
    const x = was.left - is.left, y = was.top - is.top;
    if (x || y) node.animate({ translate: [`${x}px ${y}px`, "0 0"] }, timing);
    if (node.tagName !== "rect") continue;
    for (const side of ["width", "height"]) {
      if (Math.abs(was[side] - is[side]) > 0.5) node.animate({ [side]: [`${was[side]}px`, `${is[side]}px`] }, timing);
    }
  }
}
