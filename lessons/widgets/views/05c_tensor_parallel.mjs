// One MLP on several ranks, a row per step. What a rank holds is all of it, a slice of it, or a summand of it.

export function steps(trace) {
  return trace.steps.length;
}

const LAYOUTS = {
  replicated: ["green", "every rank has all of it"], sharded: ["blue", "each has a slice: concatenate"],
  partial: ["orange", "each has a summand: add"], broken: ["red", "the ranks disagree"],
};

const signed = (value) => String(value).replace("-", "−");

export function draw(trace, index, kit) {
  const { svg, rect, text, line, box, numbers, legend, number } = kit;
  const shown = trace.steps.slice(0, index + 1), ranks = shown[0].values.length, shapes = [];
  const gap = 14, wide = (kit.width - gap * (ranks - 1)) / ranks;
  const rows_of = (n) => Math.ceil((n * 34) / Math.max(34, wide));
  let y = 24;
  for (let rank = 0; rank < ranks; rank++) shapes.push(text(rank * (wide + gap) + wide / 2, 13, ranks === 1 ? "one rank" : `rank ${rank}`, "middle small soft"));
  shown.forEach((step, i) => {
    const [css] = LAYOUTS[step.layout], here = i === index;
    const lines = rows_of(Math.max(...step.values.map((v) => v.length))), per_line = Math.ceil(Math.max(...step.values.map((v) => v.length)) / lines), high = 26 * lines + 8;
    const talks = step.sent > 0 && ranks > 1;
    if (talks) { // everybody's numbers to everybody, on a ring
      for (let a = 0; a < ranks; a++) for (let b = 0; b < ranks; b++) {
        shapes.push(line(a * (wide + gap) + wide / 2, y - 8, b * (wide + gap) + wide / 2, y + 18, "accent"));
      }
      y += 14;
    }
    shapes.push(text(0, y + 13, step.name, here ? "bold" : ""), text(kit.width, y + 13, step.layout, `small end ${css === "grey" ? "soft" : css}`));
    y += 20;
    step.values.forEach((values, rank) => {
      const x = rank * (wide + gap), cell = Math.min(80, (wide - 8) / per_line), indent = (wide - cell * Math.min(values.length, per_line)) / 2;
      shapes.push(rect(x, y, wide, high, here ? "outline accent" : "outline line"));
      values.forEach((value, j) => shapes.push(box(x + indent + 1.5 + (j % per_line) * cell, y + 4 + 26 * Math.floor(j / per_line), cell - 3, 23, signed(value), css)));
    });
    y += high + 16;
  });
  const step = shown.at(-1), last = index === trace.steps.length - 1, [, meaning] = LAYOUTS[step.layout];
  const wrong = trace.right.filter((right) => !right).length;
  return {
    picture: [
      svg(kit.width, y, `${ranks} ranks after ${step.name}: ${step.values.map((v) => v.join(" ")).join("; ")}`, ...shapes),
      legend(...Object.values(LAYOUTS)),
      numbers([trace.reference.map(signed).join(", "), "what one rank alone computes"], [number(shown.reduce((sum, s) => sum + s.sent, 0)), "numbers sent by each rank"], [shown.filter((s) => s.sent > 0).length, "collectives"],
        ...(last ? [[wrong ? "wrong" : "right", wrong ? `on ${wrong} of ${ranks} ranks` : "on every rank", wrong ? "red" : "green"]] : [])),
    ],
    text: `${step.name[0].toUpperCase()}${step.name.slice(1)}: ${ranks === 1 ? "with one rank there is nothing to share" : meaning}. `
      + (last ? (wrong ? `The shapes are right, nothing complains, and the values are wrong${wrong < ranks ? ` on ${wrong} of ${ranks} ranks` : ""}.` : `That is what one rank alone computes, for ${trace.collectives} collective${trace.collectives === 1 ? "" : "s"}.`) : step.layout === "broken" ? "Nobody notices: the shapes are right." : ""),
  };
}
