// A row of eight scores, tile by tile, and the three numbers that are all that remains of a tile: m, ℓ and O.

export function steps(trace) {
  return trace.tiles.length;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, box, numbers, legend, number } = kit;
  const { params: p, tiles, keys, result, expected, verdict, hbm_floats } = trace, tile = tiles[index], last = index === tiles.length - 1;
  const shown = (value) => (typeof value !== "number" ? { "-inf": "−∞", inf: "∞", nan: "not a number" }[value] ?? String(value) : Number.isInteger(value) && Math.abs(value) < 1e6 ? String(value) : Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : value.toFixed(3));
  const cell = kit.width / 8, high = 130, top = 26, base = top + high, shapes = [], most = Math.max(...keys) || 1;

  tiles.forEach(({ start, stop, scores, after }, i) => {
    const state = i < index ? "blue" : i === index ? "orange" : "free";
    if (i === index) shapes.push(rect(start * cell, top - 6, (stop - start) * cell, high + 44, "outline accent"));
    for (let key = start; key < stop; key++) {
      const h = 6 + (keys[key] / most) * (high - 26);
      shapes.push(rect(key * cell + 4, base - h, cell - 8, h, state, `key ${key}`), text((key + 0.5) * cell, base + 16, shown(scores[key - start]), `middle${i > index ? " soft" : " bold"}`));
      shapes.push(text((key + 0.5) * cell, base + 31, `key ${key}`, "small soft middle"));
    }
    if (i <= index && typeof after.m === "number" && p.subtract_max) {
      const y = base - (6 + (after.m / p.scale / most) * (high - 26));
      shapes.push(line(start * cell, y, stop * cell, y, "purple thick"));
      if (i === index) shapes.push(text(start * cell + 3, 14, `m = ${shown(after.m)}`, "purple small bold"));
    }
  });
  shapes.push(line(0, base, kit.width, base, "ink"));

  // The three numbers, before and after this tile.
  const y = base + 74, third = (kit.width - 24) / 3, names = [["m", "largest score so far", "m"], ["ℓ", "sum of exp(score − m)", "l"], ["O", "sum of weight × value", "o"]];
  names.forEach(([sign, meaning, field], i) => {
    const x = i * (third + 12), bad = ["nan", "inf"].includes(tile.after[field]);
    shapes.push(box(x, y, third, 62, "", bad ? "red" : "blue"));
    shapes.push(text(x + 10, y + 20, sign, "bold"), text(x + third - 8, y + 19, kit.width < 480 ? "" : meaning, "small soft end"));
    shapes.push(text(x + 10, y + 38, `from ${shown(tile.before[field])}`, "small soft"), text(x + 10, y + 54, `to ${shown(tile.after[field])}`, `small bold${bad ? " red" : ""}`));
  });
  const factor = p.rescale ? `The past is worth α = exp(m before − m after) = ${shown(tile.alpha)} of what it was` : "Nobody multiplies the past by α";
  shapes.push(text(0, y - 12, `tile ${index + 1}: keys ${tile.start} to ${tile.stop - 1}`, "bold"));

  const traffic = [["online", hbm_floats.online, "blue"], ["unfused", hbm_floats.naive, "grey"]], per = Math.floor(kit.width / 9), squares = [];
  let row = y + 92;
  for (const [name, n, css] of traffic) {
    squares.push(text(0, row, `${n} floats through HBM, ${name}`, "small soft"));
    for (let i = 0; i < n; i++) squares.push(rect((i % per) * 9, row + 6 + 9 * Math.floor(i / per), 7, 7, css));
    row += 30 + 9 * Math.floor((n - 1) / per);
  }
  const grew = typeof tile.before.m === "number" && tile.after.m > tile.before.m;
  return {
    picture: [
      svg(kit.width, row - 10, `Tile ${index + 1} of ${tiles.length}: m ${shown(tile.after.m)}, l ${shown(tile.after.l)}, O ${shown(tile.after.o)}.`, ...shapes, ...squares),
      legend(...(p.subtract_max ? [["purple", "m, the largest so far"]] : []), ["orange", "this tile"], ["blue", "seen, and forgotten but for m, ℓ and O"], ["free", "not read yet"]),
      numbers([shown(result), "O / ℓ at the end", verdict === "right" ? "green" : "red"], [shown(expected), "softmax over the whole row"], [verdict, "in the end", verdict === "right" ? "green" : "red"]),
    ],
    text: `${!p.subtract_max ? `No maximum is subtracted: ${typeof tile.after.l === "number" ? "exp(s) is added as it is" : "ℓ has overflowed"}` : index === 0 ? "The first tile has no past to rescale" : grew || !p.rescale ? factor : `The maximum did not grow: α is ${shown(tile.alpha)}, and the past stays as it is`}.`
      + (last && verdict !== "right" ? ` In the end O / ℓ is ${shown(result)} instead of ${shown(expected)}.` : "")
      + (last && verdict === "right" && (!p.rescale || !p.subtract_max) ? " And the result is right all the same: a test with these scores would have passed." : ""),
  };
}
