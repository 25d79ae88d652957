// Eight bars: what each key's value weighs by now. A larger score makes all bars before it shrink by α; red is what should have gone.

export function steps(trace) {
  return trace.tiles.length;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, box, key, numbers, legend } = kit;
  const { params: p, tiles, keys, expected, verdict, verdicts, hbm_floats } = trace, tile = tiles[index], last = index === tiles.length - 1;
  const shown = (value) => (typeof value !== "number" ? { "-inf": "−∞", inf: "∞", nan: "not a number" }[value] ?? String(value) : Number.isInteger(value) && Math.abs(value) < 1e6 ? String(value) : Math.abs(value) >= 1e4 || (value && Math.abs(value) < 5e-4) ? value.toExponential(0) : value.toFixed(3));
  const cell = kit.width / keys.length, high = 120, top = 24, base = top + high, shapes = [];
  const tall = (weight) => (typeof weight === "number" ? Math.min(1, weight) * high : high);

  tiles.forEach(({ start, stop }, i) => {
    const state = i < index ? "blue" : "orange";
    for (let at = start; at < stop; at++) {
      const x = at * cell + 4, wide = cell - 8, score = text((at + 0.5) * cell, base + 16, shown(p.scale * keys[at]), `middle small${i > index ? " soft" : " bold"}`);
      shapes.push(rect(x, top, wide, high, "free"), score);
      if (i > index) continue;
      const now = tile.now[at], due = Math.min(tall(now), tall(tile.due[at])), more = tall(now) - due, was = i < index ? tiles[index - 1].now[at] : now;
      const wrong = typeof now !== "number" || now > 1.001 * tile.due[at] + 1e-6;
      if (i < index) shapes.push(rect(x, base - tall(was), wide, tall(was), "outline grey dashed"));
      shapes.push(key(`bar ${at}`, rect(x, base - Math.max(1, due), wide, Math.max(1, due), state)));
      if (more > 0.5) shapes.push(key(`excess ${at}`, rect(x, base - due - more, wide, more, "red", "this should have shrunk")));
      shapes.push(text((at + 0.5) * cell, base + 31, shown(now), `small middle${wrong ? " red bold" : ""}`));
    }
    if (i === index) shapes.push(rect(start * cell + 1, top - 4, (stop - start) * cell - 2, high + 4, "outline accent"));
  });
  shapes.push(line(0, base, kit.width, base, "ink"), text(0, 11, kit.width < 480 ? "weights by now" : "what each key weighs by now", "small soft"), text(kit.width, 11, index === 0 ? "the first tile" : p.rescale && p.subtract_max ? `the past shrinks by α = ${shown(tile.alpha)}` : "the past is left as it is", `small end bold${index && !(p.rescale && p.subtract_max) ? " red" : ""}`));
  shapes.push(text(0, base + 48, "below each bar: its score, and its weight", "small soft"));

  // What is kept of everything that was read: three numbers.
  const y = base + 60, third = (kit.width - 16) / 3;
  [["m", "m"], ["ℓ", "l"], ["O", "o"]].forEach(([sign, field], i) => {
    const bad = ["nan", "inf"].includes(tile.after[field]);
    shapes.push(box(i * (third + 8), y, third, 28, kit.width < 480 ? `${sign} → ${shown(tile.after[field])}` : `${sign}: ${shown(tile.before[field])} → ${shown(tile.after[field])}`, bad ? "red" : "grey"));
  });

  // The four tests, one for each order.
  const names = Object.keys(verdicts), wide = (kit.width - 24) / 4, row = y + 56;
  shapes.push(text(0, row - 7, "the same code on all four orders:", "small soft"));
  names.forEach((order, i) => shapes.push(key(`test ${order}`, box(i * (wide + 8), row, wide, 24, kit.width < 480 ? `${verdicts[order] === "right" ? "✓" : "✗"} ${order}` : `${order}: ${verdicts[order]}`, verdicts[order] === "right" ? "green" : "red"))));

  const off = verdict !== "right", [mean, exact] = tile.mean, grew = index > 0 && tile.after.m > tile.before.m, close = typeof mean === "number" && Math.abs(mean - exact) < 0.02;
  return {
    picture: [
      svg(kit.width, row + 28, `Tile ${index + 1} of ${tiles.length}: m ${shown(tile.after.m)}, l ${shown(tile.after.l)}, O ${shown(tile.after.o)}.`, ...shapes),
      legend(["orange", "this tile"], ["blue", "tiles before it"], ["grey", "dashed: before this tile"], ["red", "weighs too much"]),
      numbers([shown(mean), "O / ℓ so far", close ? "green" : "red"], [shown(exact), "softmax so far"], [hbm_floats.online, "floats through HBM"], [hbm_floats.naive, "unfused"]),
    ],
    text: `${!p.subtract_max ? `No maximum is subtracted: ${typeof tile.after.l === "number" ? "exp(s) is added as it is" : "ℓ has overflowed"}` : index === 0 ? "The first tile has no past to shrink" : p.rescale ? (grew ? `A larger score: everything before it is multiplied by α = ${shown(tile.alpha)}` : `The maximum did not grow: α is 1, and the past stays as it is`) : "Nobody multiplies the past by α"}.`
      + (last && off ? ` In the end O / ℓ is ${shown(mean)} instead of ${shown(expected)}.` : "")
      + (last && !off && !(p.rescale && p.subtract_max) ? " And the result is right all the same: a test with these scores would have passed." : ""),
  };
}
