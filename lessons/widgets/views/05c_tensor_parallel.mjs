// One MLP on several ranks: what each rank owns of A and B, and, a row per step, what it holds: all, a slice, or a summand.

export function steps(trace) {
  return trace.steps.length;
}

const LAYOUTS = {
  replicated: ["green", "every rank has all of it"], sharded: ["blue", "each has a slice: concatenate"],
  partial: ["orange", "each has a summand: add"], broken: ["red", "the ranks disagree"],
};

const signed = (value) => String(value).replace("-", "−");

export function draw(trace, index, kit) {
  const { svg, rect, text, line, path, box, numbers, legend, number } = kit;
  const shown = trace.steps.slice(0, index + 1), ranks = shown[0].values.length, shapes = [];
  const gap = 14, wide = (kit.width - gap * (ranks - 1)) / ranks, left = (rank) => rank * (wide + gap), centre = (rank) => left(rank) + wide / 2;
  const total = (step) => step.values.reduce((sum, v) => sum + v.length, 0);
  let y = 20;
  for (let rank = 0; rank < ranks; rank++) shapes.push(text(centre(rank), 13, ranks === 1 ? "one rank" : `rank ${rank}`, "middle small soft"));

  // A weight as it is stored, a row per output and a column per input, and the part of it that a rank owns.
  const matrix = (name, cut, rows, columns, on) => {
    const named = wide > 150, s = Math.min(11, (wide - (named ? 84 : 8)) / 8), each = (cut === "column" ? rows : columns) / ranks;
    for (let rank = 0; rank < ranks; rank++) {
      const first = rank * each, own = cut === "column" ? `${name}[${first}:${first + each}, :]` : `${name}[:, ${first}:${first + each}]`;
      const x = centre(rank) - (columns * s) / 2 + (named ? 40 : 0);
      for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
        const at = cut === "column" ? r : c;
        shapes.push(rect(x + c * s, y + r * s, s - 1, s - 1, at >= first && at < first + each ? `purple${on ? "" : " faint"}` : "free", own));
      }
      if (named) shapes.push(text(x - 10, y + (rows * s) / 2 + 4, own, `mono end${on ? "" : " soft"}`));
    }
    y += rows * s + 8;
  };

  trace.steps.forEach((step, i) => {
    const [css] = LAYOUTS[step.layout], here = i === index, done = i <= index, before = trace.steps[i - 1];
    const [, cut, name] = step.name.match(/(column|row)-parallel ([AB])/) ?? [];
    const most = Math.max(...step.values.map((v) => v.length)), lines = Math.ceil((most * 34) / Math.max(34, wide)), per_line = Math.ceil(most / lines), high = 26 * lines + 8;
    if (step.sent > 0 && ranks > 1) { // from every rank into one place, and back to every rank
      const css = `${here ? "accent" : "soft"}${done ? "" : " faint"}`;
      for (let rank = 0; rank < ranks; rank++) shapes.push(line(centre(rank), y - 13, centre(rank), y, css), path(`M${centre(rank)} ${y}V${y + 15}`, `${css} arrow`));
      shapes.push(line(centre(0), y, centre(ranks - 1), y, `${css} thick`), text(kit.width / 2, y + 4, step.name === "all-reduce" ? "add" : "join", `small middle halo${here ? " bold" : done ? "" : " soft"}`));
      y += 18;
    }
    y += 17;
    shapes.push(text(0, y - 4, step.name, `halo${here ? " bold" : done ? "" : " soft"}`), text(kit.width, y - 4, step.layout, `small end halo ${done ? css : "soft"}`));
    y += 2;
    if (cut) matrix(name, cut, cut === "column" ? total(step) : step.values[0].length, cut === "column" ? before.values[0].length : total(before), done);
    step.values.forEach((values, rank) => {
      const cell = Math.min(80, (wide - 8) / per_line), indent = (wide - cell * Math.min(values.length, per_line)) / 2;
      shapes.push(rect(left(rank), y, wide, high, here ? "outline accent" : "outline line"));
      if (done) values.forEach((value, j) => shapes.push(box(left(rank) + indent + 1.5 + (j % per_line) * cell, y + 4 + 26 * Math.floor(j / per_line), cell - 3, 23, signed(value), css)));
    });
    y += high + 14;
  });
  const step = shown.at(-1), last = index === trace.steps.length - 1, [, meaning] = LAYOUTS[step.layout];
  const wrong = trace.right.filter((right) => !right).length;
  return {
    picture: [
      svg(kit.width, y, `${ranks} ranks after ${step.name}: ${step.values.map((v) => v.join(" ")).join("; ")}`, ...shapes),
      legend(["purple", "weights of this rank, outputs × inputs"], ...Object.values(LAYOUTS)),
      numbers([trace.reference.map(signed).join(", "), "what one rank alone computes"], [number(shown.reduce((sum, s) => sum + s.sent, 0)), "numbers sent by each rank"], [shown.filter((s) => s.sent > 0).length, "collectives"],
        ...(last ? [[wrong ? "wrong" : "right", wrong ? `on ${wrong} of ${ranks} ranks` : "on every rank", wrong ? "red" : "green"]] : [])),
    ],
    text: `${step.name[0].toUpperCase()}${step.name.slice(1)}: ${ranks === 1 ? "with one rank there is nothing to share" : meaning}. `
      + (last ? (wrong ? `The shapes are right, nothing complains, and the values are wrong${wrong < ranks ? ` on ${wrong} of ${ranks} ranks` : ""}.` : `That is what one rank alone computes, for ${trace.collectives} collective${trace.collectives === 1 ? "" : "s"}.`) : step.layout === "broken" ? "Nobody notices: the shapes are right." : ""),
  };
}
