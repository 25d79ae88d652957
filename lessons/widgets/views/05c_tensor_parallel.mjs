// One MLP on several ranks: what each rank owns of A and B, and, a row per step, what it holds: all, a slice, or a summand.
// Where they talk, a copy of each number glides from the rank that sends it to those that need it.

export function steps(trace) {
  return trace.steps.length;
}

const LAYOUTS = {
  replicated: ["green", "all of it"], sharded: ["blue", "a slice"],
  partial: ["purple", "a summand"], broken: ["red", "the ranks disagree"],
};

const signed = (value) => String(value).replace("-", "−");

export function draw(trace, index, kit) {
  const { svg, rect, text, line, path, box, key, numbers, legend, number } = kit;
  const shown = trace.steps.slice(0, index + 1), ranks = shown[0].values.length, shapes = [];
  const gap = 14, wide = (kit.width - gap * (ranks - 1)) / ranks, left = (rank) => rank * (wide + gap), centre = (rank) => left(rank) + wide / 2;
  const total = (step) => step.values.reduce((sum, v) => sum + v.length, 0);
  const tight = trace.steps.length > 5, line_high = tight ? 17 : 22; // seven rows have less room than four
  let y = 20;
  for (let rank = 0; rank < ranks; rank++) shapes.push(text(centre(rank), 13, ranks === 1 ? "one rank" : `rank ${rank}`, "middle small soft"));

  // A weight as it is stored, a row per output and a column per input, and the part of it that a rank owns.
  const matrix = (name, cut, rows, columns, on) => {
    const named = wide > 150, s = Math.min(tight ? (kit.width < 480 ? 4 : 5) : kit.width < 480 ? 7 : 8, (wide - (named ? 84 : 8)) / 8), each = (cut === "column" ? rows : columns) / ranks;
    for (let rank = 0; rank < ranks; rank++) {
      const first = rank * each, own = cut === "column" ? `${name}[${first}:${first + each}, :]` : `${name}[:, ${first}:${first + each}]`;
      const x = centre(rank) - (columns * s) / 2 + (named ? 40 : 0);
      for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
        const at = cut === "column" ? r : c;
        shapes.push(rect(x + c * s, y + r * s, s - 1, s - 1, at >= first && at < first + each ? `teal${on ? "" : " faint"}` : "free", own));
      }
      if (named) shapes.push(text(x - 10, y + (rows * s) / 2 + 4, own, `mono end${on ? "" : " soft"}`));
    }
    y += rows * s + 3;
  };

  // The numbers that rank `rank` is about to send at step i, and those that it has just received.
  const travellers = (i, rank, slot) => {
    const [step, next] = [trace.steps[i], trace.steps[i + 1]], others = [...Array(ranks).keys()].filter((other) => other !== rank), found = [];
    const copy = (i, from, to, j, place) => found.push(key(`${i}: ${from} to ${to}, ${j}`, box(...place, "", LAYOUTS[trace.steps[i - 1].layout][0])));
    if (next?.sent > 0) for (const to of others) step.values[rank].forEach((_, j) => copy(i + 1, rank, to, j, slot(j)));
    if (step.sent > 0) {
      for (const from of others) {
        const sent = trace.steps[i - 1].values[from], first = step.values[rank].length > sent.length ? from * sent.length : 0; // joined or added
        sent.forEach((_, j) => copy(i, from, rank, j, slot(first + j)));
      }
    }
    return found;
  };

  trace.steps.forEach((step, i) => {
    const [css] = LAYOUTS[step.layout], here = i === index, done = i <= index, before = trace.steps[i - 1];
    const [, cut, name] = step.name.match(/(column|row)-parallel ([AB])/) ?? [];
    const most = Math.max(...step.values.map((v) => v.length)), lines = Math.ceil((most * 18) / Math.max(18, wide)), per_line = Math.ceil(most / lines), high = line_high * lines + 4;
    if (step.sent > 0 && ranks > 1) { // from every rank into one place, and back to every rank
      const css = `${here ? "accent" : "soft"}${done ? "" : " faint"}`;
      for (let rank = 0; rank < ranks; rank++) shapes.push(line(centre(rank), y - 2, centre(rank), y + 7, css), path(`M${centre(rank)} ${y + 7}V${y + 28}`, `${css} arrow`));
      shapes.push(line(centre(0), y + 7, centre(ranks - 1), y + 7, `${css} thick`), text(kit.width / 2, y + 11, step.name === "all-reduce" ? "add" : "join", `small middle halo${here ? " bold" : done ? "" : " soft"}`));
      y += tight ? 12 : 16;
    }
    y += 15;
    shapes.push(text(0, y - 3, step.name, `halo${here ? " bold" : done ? "" : " soft"}`), text(kit.width, y - 3, step.layout, `small end halo ${done ? css : "soft"}`));
    y += 1;
    if (cut) matrix(name, cut, cut === "column" ? total(step) : step.values[0].length, cut === "column" ? before.values[0].length : total(before), done);
    step.values.forEach((values, rank) => {
      const cell = Math.min(80, (wide - 8) / per_line), indent = (wide - cell * Math.min(values.length, per_line)) / 2;
      const slot = (j) => [left(rank) + indent + 1.5 + (j % per_line) * cell, y + 3 + line_high * Math.floor(j / per_line), cell - 3, line_high - 2];
      shapes.push(rect(left(rank), y, wide, high, here ? "outline accent" : "outline line"));
      if (here) shapes.push(...travellers(i, rank, slot)); // under the numbers that they are, or become
      if (done) values.forEach((value, j) => shapes.push(box(...slot(j), signed(value), css)));
    });
    y += high + (tight ? 2 : 7);
  });
  const step = shown.at(-1), last = index === trace.steps.length - 1, [, meaning] = LAYOUTS[step.layout];
  const wrong = trace.right.filter((right) => !right).length;
  return {
    picture: [
      svg(kit.width, y, `${ranks} ranks after ${step.name}: ${step.values.map((v) => v.join(" ")).join("; ")}`, ...shapes),
      legend(["teal", "its weights"], ...Object.values(LAYOUTS)),
      numbers([number(shown.reduce((sum, s) => sum + s.sent, 0)), "numbers sent by each rank"], [shown.filter((s) => s.sent > 0).length, "collectives"],
        ...(last ? [[wrong ? "wrong" : "right", wrong ? `on ${wrong} of ${ranks} ranks` : "on every rank", wrong ? "red" : "green"]] : [])),
    ],
    text: `${step.name[0].toUpperCase()}${step.name.slice(1)}: ${ranks === 1 ? "with one rank there is nothing to share" : step.layout === "broken" ? meaning : `every rank has ${meaning}`}. `
      + (last ? (wrong ? `One rank alone computes ${trace.reference.map(signed).join(", ")}. The shapes are right, and nothing complains.` : `That is what one rank alone computes, for ${trace.collectives} collective${trace.collectives === 1 ? "" : "s"}.`) : step.layout === "broken" ? "Nobody notices: the shapes are right." : ""),
  };
}
