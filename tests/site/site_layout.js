// What is wrong with the layout of the page's widget, as a list of sentences; test_site.py runs this in the browser.
() => {
  const found = [];
  for (const motion of document.getAnimations()) motion.finish(); // where things glide to, not where they are on their way
  const visible = (node) => node.getBoundingClientRect().width > 0;
  const all = (selector) => [...document.querySelectorAll(selector)].filter(visible);

  const over = document.documentElement.scrollWidth - innerWidth;
  if (over > 0) found.push(`the page is ${over} px too wide`);
  for (const node of all("#widget *")) {
    const { left, right } = node.getBoundingClientRect();
    const scrolls = node.closest("pre, .table, .figure, details:not([open])");
    if ((right > innerWidth + 1 || left < -1) && !scrolls) found.push(`sticks out: ${node.outerHTML.slice(0, 120)}`);
  }

  for (const node of all("#widget svg text, #widget .picture :is(small, span, li, code), #widget label, #widget output")) {
    const size = parseFloat(getComputedStyle(node).fontSize);
    if (size < 11) found.push(`${size} px high: ${node.textContent}`);
  }

  const [from, to] = [".controls", ".picture"].map((name) => document.querySelector(`#widget ${name}`).getBoundingClientRect().top);
  if (to - from > innerHeight - 250) found.push(`one who turns the first control does not see the picture, ${Math.round(to - from)} px below`);

  for (const picture of all("#widget svg[role=img]")) {
    const drawn = picture.viewBox.baseVal.width, shown = picture.getBoundingClientRect().width;
    if (Math.abs(drawn - shown) > 1) found.push(`drawn for ${drawn} px and scaled to ${shown} px`);
  }

  for (const node of all("#widget svg[role=img] text")) {
    const text = node.getBoundingClientRect(), room = node.ownerSVGElement.getBoundingClientRect();
    const out = Math.max(room.left - text.left, text.right - room.right, text.bottom - room.bottom);
    if (out > 8) found.push(`“${node.textContent}” sticks ${Math.round(out)} px out of the picture`);
  }

  const texts = all("#widget svg text").map((node) => [node.textContent, node.getBoundingClientRect()]);
  texts.forEach(([a, p], i) => texts.slice(i + 1).forEach(([b, q]) => {
    const x = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (x > 3 && y > 5) found.push(`“${a}” lies on “${b}”`);
  }));
  return found.slice(0, 5);
}
