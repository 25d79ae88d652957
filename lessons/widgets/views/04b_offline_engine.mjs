// Above: each word's probability on a logarithmic scale, where a cut is a line below which words fall; min_p's can be dragged.
// Below: the same words as pieces of the line [0, 1), and the draws that land on it.

const MODEL = 0, FIRST = 1; // steps: the model's own row, its stations, then the draws
const DECADES = 4; // from 100 % down to 0.01 %; what is less lies on the ground

export function steps(trace) {
  return FIRST + trace.stages.length + trace.draws.length;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, path, circle, key, html, numbers, legend, count, params: p } = kit;
  const color = (i) => (i > 5 ? "red" : kit.color(i)); // the last two words are nonsense
  const { words, draws, u } = trace, narrow = kit.width < 480, greedy = p.temperature === 0;
  const rows = [{ stage: "model", probs: trace.model, kept: words.map((_, i) => i) }, ...trace.stages];
  const at = Math.min(index, rows.length - 1), now = rows[at], before = rows[Math.max(0, at - 1)];
  const drawn = Math.max(0, index - at), shapes = [], labels = []; // labels lie above all lines
  const percent = (x) => `${(100 * x).toFixed(x >= 0.1 ? 0 : x >= 0.01 ? 1 : x >= 1e-4 ? 2 : 4)}`;
  const total = (probs, which) => which.reduce((sum, i) => sum + probs[i], 0);
  const quoted = (i) => `“${words[i]}”`, names = (which) => which.map(quoted).join(", ").replace(/, ([^,]*)$/, " and $1");
  const best = (probs) => probs.indexOf(Math.max(...probs));

  // The columns. A word that is cut keeps the height at which it was.
  const left = 50, cell = (kit.width - left) / words.length, high = 116, top = 34, base = top + high;
  const height = (x) => Math.max(1, high * (1 + Math.log10(x) / DECADES));
  for (const [exponent, name] of [[0, "100 %"], [1, "10 %"], [2, "1 %"], [3, "0.1 %"]]) {
    const y = top + (high * exponent) / DECADES;
    shapes.push(line(left, y, kit.width, y, "line"), text(left - 6, y + 4, name, "small soft end"));
  }
  shapes.push(text(0, base + 15, "log scale", "small soft"));
  const ghosts = []; // how high the columns were before this station
  words.forEach((word, i) => {
    const x = left + i * cell, w = cell - (narrow ? 5 : 12), middle = x + w / 2;
    const cut = rows.findIndex(({ kept }, row) => row <= at && !kept.includes(i));
    const share = cut < 0 ? now.probs[i] : rows[cut - 1].probs[i], y = base - height(share);
    const by = cut < 0 ? null : rows[cut].stage === "temperature" ? "not best" : rows[cut].stage;
    shapes.push(key(`word ${i}`, rect(x, y, w, height(share), by ? "hatch grey" : `box ${color(i)}`, `${word}: ${percent(share)} %${by ? `, then cut (${by})` : ""}`)));
    const was = base - height(before.probs[i] || share);
    if (!by && !drawn && Math.abs(was - y) > 1) ghosts.push(line(x - 2, was, x + w + 2, was, "ink dashed"));
    const over = by && height(share) > 24 ? y + 16 : y - 5; // what cut it stands inside
    labels.push(text(middle, over, by && narrow ? by.replace("not best", "cut") : by ?? percent(share), `small middle halo${by ? "" : " bold"}`));
    shapes.push(text(middle, base + (narrow && i % 2 ? 28 : 15), word, "small middle"));
    const said = [trace.prompt, trace.output].map((tokens) => tokens.filter((token) => token === i).length);
    said.forEach((n, row) => n && shapes.push(text(middle, base + (narrow ? 46 : 34) + 14 * row, `${n} ×`, "small soft middle")));
  });
  shapes.push(...ghosts, line(left, base, kit.width, base, "ink"));
  ["prompt", "said"].forEach((name, row) => shapes.push(text(left - 6, base + (narrow ? 46 : 34) + 14 * row, name, "small soft end")));

  // The line of each cut: on this scale it moves with the best word when the rest is made to fill the whole.
  const lowest = {
    min_p: ({ probs }) => p.min_p * Math.max(...probs),
    top_k: ({ probs, kept }) => Math.min(...kept.map((i) => probs[i])),
    top_p: ({ probs, kept }) => Math.min(...kept.map((i) => probs[i])),
  };
  const on = { min_p: p.min_p > 0, top_k: p.top_k > 0, top_p: p.top_p < 1 };
  rows.slice(0, at + 1).forEach((row, i) => {
    if (greedy || !on[row.stage]) return;
    const y = base - height((lowest[row.stage](row) * Math.max(...now.probs)) / Math.max(...row.probs));
    shapes.push(line(left - 2, y, kit.width, y, `accent ${i === at && !drawn ? "thick" : "dashed"}`));
  });
  shapes.push(...labels);
  const heading = {
    model: "What the model says",
    penalties: `Penalty: ${p.penalty}`,
    temperature: `Temperature ${p.temperature}${greedy ? ": the best has it all" : p.temperature === 1 ? "" : `: every difference ÷ ${p.temperature}`}`,
    min_p: on.min_p ? `min_p ${p.min_p}: the line is at ${p.min_p} × the best` : "min_p: off",
    top_k: on.top_k ? `top_k ${p.top_k}: the line is at number ${p.top_k}` : "top_k: off",
    top_p: on.top_p ? `top_p ${p.top_p}: the line is where ${percent(p.top_p)} % are held` : "top_p: off",
  }[now.stage];
  shapes.push(text(0, 13, drawn ? "What the draws are made from" : greedy && now.stage in on ? `${now.stage} is not asked: temperature 0 is greedy` : heading, "bold"));

  // The handle of min_p's line: dragged up and down, it takes the nearest of the values that the control has.
  if (!greedy && at >= 3) {
    const most = Math.max(...rows[3].probs), handle = on.min_p ? base - height((p.min_p * most * Math.max(...now.probs)) / most) : base - 4;
    const drag = (event) => {
      if (!event.buttons || !kit.set) return;
      const box = event.currentTarget.ownerSVGElement.getBoundingClientRect(), share = 10 ** ((DECADES * (base - (event.clientY - box.top) - high)) / high) / Math.max(...now.probs);
      kit.set("min_p", [0.5, 0.2, 0.05].find((value) => share > value * 0.55) ?? 0);
    };
    shapes.push(key("handle", circle(kit.width - 6, handle, 6, "accent")), text(kit.width - 16, handle - 5, "drag", "small soft end halo"));
    shapes.push(kit.shape("rect", { x: left, y: top - 8, width: kit.width - left, height: high + 8, class: "drag", onpointerdown: drag, onpointermove: drag }));
  }

  // The same as pieces of [0, 1): what the cuts leave is made to fill the whole line again.
  const first = base + (narrow ? 88 : 76), thick = 20;
  const ends = now.probs.reduce((all, x) => [...all, all.at(-1) + x], [0]);
  shapes.push(text(0, first - 7, "the words on the line [0, 1), and where the draws fall", "small soft"), rect(0, first, kit.width, thick, "free"));
  words.forEach((word, token) => {
    if (!now.kept.includes(token)) return;
    const [x, wide] = [ends[token] * kit.width, now.probs[token] * kit.width];
    shapes.push(key(`piece ${token}`, rect(x, first, wide, thick, `box ${color(token)}`, `${word}: ${percent(now.probs[token])} %`)));
    if (wide > 7 * word.length + 8) shapes.push(text(x + wide / 2, first + 14, word, "small middle"));
  });
  draws.forEach((token, i) => {
    const x = u[i] * kit.width, y = first + thick + 9 + (i % 4) * 9;
    if (i < drawn) shapes.push(key(`draw ${i}`, circle(x, y, i === drawn - 1 ? 5.5 : 4, color(token))));
  });
  const floor = first + thick + 44;

  const lost = before.kept.filter((i) => !now.kept.includes(i)), [top_now, top_before] = [best(now.probs), best(before.probs)];
  const told = lost.length ? `${names(lost)} ${lost.length > 1 ? "are" : "is"} cut, and ${percent(total(before.probs, lost))} % of the line with ${lost.length > 1 ? "them" : "it"}.` : "Nobody lies below it.";
  const repeated = { "none": "No penalty: what was said makes no difference.",
    "repetition 1.5": "“the”, “sea” and “moon” were in the prompt or said: their logits are divided by 1.5.",
    "presence 1": "“the” and “moon” were said: each loses 1 from its logit. “sea” was only in the prompt.",
    "frequency 1": "“the” was said twice and loses 2 from its logit, “moon” 1. “sea” was only in the prompt." }[p.penalty];
  const says = {
    model: () => `The model's own row: ${quoted(top_now)} has ${percent(now.probs[top_now])} %, “zzz” ${percent(now.probs.at(-1))} %.`,
    penalties: () => repeated + (top_now !== top_before ? ` The best is now ${quoted(top_now)}.` : ""),
    temperature: () => (greedy ? `Temperature 0 is greedy: ${quoted(top_now)} is written, and neither the cuts nor the draw are asked.`
      : p.temperature === 1 ? "Temperature 1 changes nothing." : `Logits are divided by ${p.temperature}: on this scale the columns move ${p.temperature > 1 ? "together: the tail rises" : "apart: the tail sinks"}. “zzz” goes from ${percent(before.probs.at(-1))} to ${percent(now.probs.at(-1))} %.`),
    min_p: () => `A line at a fixed distance below the best. ${told}`,
    top_k: () => `A line through number ${p.top_k}, however probable it is. ${told}${now.kept.length > p.top_k && p.top_k < before.kept.length ? ` ${count(now.kept.length, "word")} stay, because of a tie.` : ""}`,
    top_p: () => `From the best downwards until ${percent(p.top_p)} % of the line are held. ${told}`,
  };
  const skipped = now.stage in on && (greedy || !on[now.stage]);
  const [token, last] = [draws[drawn - 1], index === steps(trace) - 1], tail = [6, 7].filter((i) => now.kept.includes(i)), odd = draws.slice(0, drawn).filter((i) => i > 5).length;
  const landed = () => `Draw ${drawn}: u = ${u[drawn - 1].toFixed(3)} falls on ${quoted(token)}, which has ${ends[token].toFixed(3)} to ${ends[token + 1].toFixed(3)}.`
    + (last ? " Another setting moves the pieces, never the numbers." : "");
  return {
    picture: [
      svg(kit.width, floor, `${drawn ? `Draw ${drawn}` : heading}: ${now.kept.map((i) => `${words[i]} ${percent(now.probs[i])} %`).join(", ")}.`, ...shapes),
      legend(["blue", "a word (each its colour)"], ["grey hatched", "cut"], ["red", "nonsense"], ["accent", "the line of a cut"], ["ink", "before this station"]),
      numbers([`${now.kept.length} of ${words.length}`, "words are left"], [`${percent(now.probs[top_now])} %`, `has the best, ${quoted(top_now)}`], [tail.length ? `${percent(total(now.probs, tail))} %` : "0 %", "have “xylophone” and “zzz”", tail.length ? "red" : ""], [odd, "nonsense drawn", odd ? "red" : ""]),
      html("p", { class: "written" }, html("span", {}, "drawn: "), draws.slice(0, drawn).map((i) => words[i]).join(" ") || "nothing yet"),
    ],
    text: drawn ? (greedy ? `Word ${drawn}: greedy, so u does not matter. ${quoted(token)} again, as often as you ask.` : landed())
      : skipped ? `${now.stage} is ${greedy ? "not asked" : "off"}: the line stays as it is.` : says[now.stage](),
  };
}
