// Weights above, the levels of their group's grid below, a line from each weight to what it becomes. The outlier's
// group comes first as a whole, on one scale for all states, and there the outlier can be dragged. Everything under it enlarges what lies around zero.

const EDGE = 0.3; // the enlargement reaches from −EDGE to EDGE

export function steps(trace) {
  return trace.weights.length + 2; // the grids, each weight, everything
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, path, circle, group: part, key, shape, numbers, legend } = kit, { params: p, weights, codes, zeroed, distinct } = trace, width = kit.width;
  const decoded = trace.decoded_millionths.map((x) => x / 1e6), grids = trace.levels_millionths.map((levels) => levels.map((x) => x / 1e6));
  const last = index === steps(trace) - 1, done = Math.min(index, weights.length), here = last ? -1 : index - 1;
  const shown = (x, digits = 3) => (x === 0 ? "0" : x.toFixed(digits).replace("-", "−"));
  const value = (i) => weights[i] / 1000, group_of = (i) => Math.floor(i / p.group), outlier = weights.indexOf(168 * p.outlier);
  const lost = (i) => decoded[i] === 0, color = (i) => (i === here ? "ink" : i === outlier && p.outlier > 1 ? "purple" : lost(i) ? "red" : "blue");
  const order = [...weights.keys()].sort((a, b) => (a === here) - (b === here)); // what is spoken of is drawn last
  const ticks = (xs, y, high) => xs.map((x) => `M${x.toFixed(1)} ${y}v${high}`).join("");
  const shapes = [];

  // The outlier’s group, all of it.
  const grid = grids[group_of(outlier)], own = order.filter((i) => group_of(i) === group_of(outlier)), most = 0.168 * 64;
  const far = (x) => width / 2 + (Math.max(-most, Math.min(most, x)) / most) * (width / 2 - 8), top = 34;
  shapes.push(text(0, 12, `${grids.length > 1 ? `group ${group_of(outlier) + 1}` : "the group"} as a whole, with its ${grid.length} levels`, "small soft"));
  shapes.push(rect(far(-EDGE), top - 9, far(EDGE) - far(-EDGE), 31, "outline line"), path(`M${far(-EDGE)} ${top + 22}L0 ${top + 42}M${far(EDGE)} ${top + 22}L${width} ${top + 42}`));
  shapes.push(line(6, top + 13, width - 6, top + 13, "line"), path(ticks(grid.map(far), top + 10, 7), "grey"));
  for (const i of own) {
    const ready = i < done;
    if (ready) shapes.push(line(far(value(i)), top, far(decoded[i]), top + 12, color(i)));
    const dot = circle(far(value(i)), top, i === outlier ? 6 : i === here ? 4 : 2.5, i === outlier && p.outlier > 1 ? "purple" : ready ? color(i) : "grey");
    shapes.push(i === outlier ? key("the outlier", dot) : dot);
  }
  shapes.push(key("its value", text(far(value(outlier)) + (p.outlier > 16 ? 8 : 0), top - 11, p.outlier > 1 ? shown(value(outlier)) : "drag it →", `small bold purple ${p.outlier > 16 ? "end" : "middle"}`)));
  const sizes = [1, 2, 4, 8, 16, 32, 64];
  const drag = (event) => {
    if (!event.buttons || !kit.set) return;
    const room = event.currentTarget.ownerSVGElement.getBoundingClientRect(), x = ((event.clientX - room.left) * width) / room.width;
    kit.set("outlier", sizes.reduce((best, n) => (Math.abs(far(0.168 * n) - x) < Math.abs(far(0.168 * best) - x) ? n : best)));
  };
  shapes.push(shape("rect", { x: width / 2, y: top - 22, width: width / 2, height: 40, class: "drag across", onpointerdown: drag, onpointermove: drag }));

  // Around zero, group by group, two side by side.
  const columns = Math.min(2, grids.length), wide = (width - 20 * (columns - 1)) / columns, drop = { 1: 96, 2: 80, 4: 46 }[grids.length];
  const near = (x) => ((Math.max(-EDGE, Math.min(EDGE, x)) + EDGE) / (2 * EDGE)) * wide;
  const least = Math.max(...grids.map((levels) => levels.length)) > 100 ? 25 : 17, per_row = [32, 16, 8, 4].find((n) => n <= p.group && wide / n >= least), cell = wide / per_row;
  const named_at = (levels) => { const inside = levels.filter((x) => Math.abs(x) < EDGE); return Math.min(...inside.slice(1).map((x, i) => near(x) - near(inside[i])), wide) >= 48; };
  const room = grids.some(named_at) ? 28 : 14, tall = 22 + drop + room + 19 * (p.group / per_row) + 22;
  let y = top + 56;
  grids.forEach((levels, g) => {
    const shapes_of = [], members = order.filter((i) => group_of(i) === g), gone = members.filter((i) => i < done && lost(i)).length, inside = levels.filter((x) => Math.abs(x) < EDGE);
    shapes_of.push(text(0, y, grids.length > 1 ? `group ${g + 1}` : "one group", "bold"));
    if (wide > 300) shapes_of.push(text(grids.length > 1 ? 66 : 78, y, `scale ${shown(trace.scale_millionths[g] / 1e6, 4)}`, "small soft"));
    if (gone) shapes_of.push(text(wide, y, wide > 300 ? `${gone} of ${p.group} become zero` : `${gone} lost`, "small bold red end"));
    const from = y + 22, to = from + drop, used = new Set(members.filter((i) => i < done).map((i) => decoded[i]));
    shapes_of.push(line(0, from, wide, from, "line"), line(0, to, wide, to, "line"), text(0, from - 5, "weights", "small soft"));
    for (const x of wide < 240 ? [0, 0.1] : wide < 360 ? [-0.1, 0, 0.1] : [-0.2, -0.1, 0, 0.1, 0.2]) if (g < columns) shapes_of.push(text(near(x), from - 8, shown(x, 1), "small soft middle"));
    shapes_of.push(path(ticks(inside.map(near), to, 7), "grey"), path(ticks(inside.filter((x) => used.has(x)).map(near), to, 9), "ink thick"));
    if (named_at(levels)) for (const x of inside) if (near(x) > 20 && near(x) < wide - 20) shapes_of.push(text(near(x), to + 20, shown(x), `small middle${used.has(x) ? " bold" : " soft"}`));
    for (const i of members) {
      if (Math.abs(value(i)) > EDGE) continue;
      const beyond = Math.abs(decoded[i]) > EDGE; // its level lies further out than this enlargement
      if (i < done) shapes_of.push(line(near(value(i)), from, near(decoded[i]), beyond ? to - 14 : to, `${color(i)}${i === here ? " thick" : ""}${beyond ? " arrow" : ""}`));
      shapes_of.push(circle(near(value(i)), from, i === here ? 4.5 : width < 480 ? 2.6 : 3.4, i < done ? color(i) : "grey", `weight ${i}`));
    }
    shapes_of.push(text(0, to - 5, "levels", "small soft halo"));
    // What is stored: a code per weight.
    const row = to + room;
    for (const i of members) {
      const x = ((i % p.group) % per_row) * cell, at = row + 19 * Math.floor((i % p.group) / per_row);
      shapes_of.push(rect(x + 1, at, cell - 2, 17, i < done ? `box ${color(i)}` : "box grey faint", `weight ${i}: ${shown(value(i))}${i < done ? `, code ${codes[i]}, means ${shown(decoded[i])}` : ""}`));
      if (i < done) shapes_of.push(text(x + cell / 2, at + 13, codes[i], "small middle"));
    }
    shapes.push(part((g % columns) * (wide + 20), 0, ...shapes_of));
    if (g % columns === columns - 1) y += tall;
  });

  const bits = trace.bits_per_weight_thousandths / 1000, mean = shown(trace.mean_error_millionths / 1e6, 4);
  const gone = weights.filter((_, i) => i < done && lost(i)).length, kinds = new Set(decoded.slice(0, done)).size, near_zero = grid.filter((x) => Math.abs(x) < EDGE).length;
  const says = () => {
    if (index === 0) return `${grids.length > 1 ? "In the outlier’s group the" : "The"} weights reach from ${shown(Math.min(...own.map(value)))} to ${shown(Math.max(...own.map(value)))}, and the ${grid.length} levels from ${shown(grid[0])} to ${shown(grid.at(-1))}. Between −${EDGE} and ${EDGE} lie ${near_zero} of them.`;
    if (!last) return `Weight ${here} is ${shown(value(here))}. The nearest level of its group is ${shown(decoded[here])}, which is code ${codes[here]}${lost(here) ? ": the weight is gone" : ""}.`;
    return `${zeroed || "No"} ${zeroed === 1 ? "weight becomes" : "weights become"} zero, and ${distinct} of 32 values are left. The mean error is ${mean}.`;
  };
  return {
    picture: [
      svg(width, y - 22, `${last ? 32 : done} weights on their grids: ${zeroed} of 32 become zero, ${distinct} distinct values.`, ...shapes),
      legend(["blue", "keeps a value"], ...(zeroed ? [["red", "becomes zero"]] : []), ...(p.outlier > 1 ? [["purple", "the outlier"]] : []), ["grey", "levels"], ...(here >= 0 ? [["ink", "this weight"]] : [])),
      numbers([bits, "bits per weight"], [last ? mean : "–", "mean error"], [last ? shown(trace.worst_error_millionths / 1e6, 4) : "–", "worst error"], [kinds, "values in use"], [gone, "became zero", gone ? "red" : ""]),
    ],
    text: says(),
  };
}
