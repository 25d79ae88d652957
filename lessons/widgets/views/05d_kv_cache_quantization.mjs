// Eight keys as attention sees them, as they are stored, one group of them on its levels, and read back. A group is
// what shares a scale: a key, or a channel. Beside the keys stand the scores of the query.

const ROW = 15, PLOT = 126, MARGIN = 14, SCORES = 44;

export function steps(trace) {
  return trace.scale_milli.length + 1; // each group, and the search
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, path, circle, group: part, shape, legend, number, numbers } = kit, p = trace.params, width = kit.width;
  const per_key = p.group === "token", last = index === steps(trace) - 1, g = !last ? index : per_key ? p.needle : 5;
  const minus = (string) => (Number(string) === 0 ? string.replace("-", "") : string.replace("-", "−")), tenth = (milli) => minus(number(milli / 1000, 1));
  const wide = width >= 560, column = wide ? (width - 36) / 2 : width, cell = (column - MARGIN - SCORES) / 16, right = MARGIN + 16 * cell;
  const verdict = trace.finds === trace.should_find ? "green" : "red", loud = p.keys.includes("channel");

  // Eight rows of sixteen cells: blue below zero, orange above, the stronger the further; `most` is the strongest.
  const map = (rows, most, size, ready = () => true) => [...cells(rows, most, size, ready), ...rows.flatMap((row, t) => row.map((x, c) => (
    ready(t, c) && Math.abs(x) > 30 ? text(MARGIN + (c + 0.5) * size, t * ROW + 11, minus(x.toFixed(0)), "small middle halo") : null)))];
  const cells = (rows, most, size, ready) => rows.flatMap((row, t) => [
    text(9, t * ROW + 12, t, "small soft end"),
    ...row.flatMap((x, c) => {
      const at = { x: MARGIN + c * size, y: t * ROW, width: size - 1, height: ROW - 1 };
      if (!ready(t, c)) return [rect(at.x, at.y, at.width, at.height, "free faint")];
      const strength = Math.min(1, Math.abs(x) / most).toFixed(2), label = shape("title", {}, `key ${t}, channel ${c}: ${tenth(1000 * x)}`);
      return [rect(at.x, at.y, at.width, at.height, "free"), shape("rect", { ...at, class: x < 0 ? "blue" : "orange", "fill-opacity": strength }, label)];
    }),
  ]);
  const row_frame = (t, css) => rect(MARGIN - 2, t * ROW - 1, right - MARGIN + SCORES + 2, ROW + 1, `outline ${css}`);
  const thousandth = (rows) => rows.map((row) => row.map((x) => x / 1000));
  const stored = thousandth(trace.stored_milli), restored = thousandth(trace.restored_milli), levels = trace.levels_milli[g].map((x) => x / 1000);

  // 1. The keys, the query, and the scores that attention would like to see.
  const query = trace.query.map((sign, c) => text(MARGIN + (c + 0.5) * cell, 16, sign > 0 ? "+" : sign < 0 ? "−" : "0", "small middle"));
  const keys = [
    text(0, 0, `1 · keys × channels, and q made for key ${p.needle}`, "bold"), ...query, text(9, 16, "q", "small soft end"), text(column, 16, "score", "small soft end"),
    part(0, 22, ...map(trace.keys, 3, cell), ...trace.scores.map((score, t) => text(column - 4, t * ROW + 12, minus(String(score)), `small end${t === trace.should_find ? " bold green" : ""}`)), row_frame(trace.should_find, "green")),
  ];

  // 2. What is stored of them, and which part of it shares a scale.
  const size = (column - MARGIN) / 16;
  const frame = per_key ? rect(MARGIN - 1, g * ROW - 1, 16 * size + 1, ROW + 1, "outline purple") : rect(MARGIN + g * size - 2, -2, size + 3, 8 * ROW + 3, "outline purple");
  const kept = [text(0, 0, p.rotation ? "2 · rotated: keys × R" : "2 · stored as they are", "bold"), text(column, 0, per_key ? "a key shares a scale" : "a channel shares a scale", "small soft end"), part(0, 22, ...map(stored, p.rotation && loud ? 18 : 3, size), frame)];

  // 3. That group's elements on its levels.
  const values = per_key ? stored[g] : stored.map((row) => row[g]), codes = per_key ? trace.codes[g] : trace.codes.map((row) => row[g]);
  const high = Math.max(...values, ...levels), low = Math.min(...values, ...levels), y = (x) => 8 + ((high - x) / (high - low)) * (PLOT - 16);
  const from = 34, step = (column - from) / values.length, x = (i) => from + (i + 0.5) * step, used = new Set(codes).size, crowded = levels.length > 100 && step < 22;
  const named = levels.length <= 8 ? levels : [levels[0], levels.at(-1)];
  const name = per_key ? `key ${g}` : `channel ${g} of all keys`;
  const plot = [
    text(0, 0, `3 · ${name} on ${levels.length} levels`, "bold"), text(column, 0, `${used} used`, "small soft end"),
    part(0, 8, path(levels.map((level) => `M${from} ${y(level).toFixed(2)}H${column}`).join(""), levels.length > 16 ? "line" : ""), ...named.map((level) => text(from - 4, y(level) + 4, minus(level.toFixed(1)), "small soft end")),
      ...values.flatMap((value, i) => [
        line(x(i) - 5, y(levels[codes[i]]), x(i) + 5, y(levels[codes[i]]), "ink thick"), line(x(i), y(value), x(i), y(levels[codes[i]]), value < 0 ? "blue thick" : "orange thick"),
        circle(x(i), y(value), 3.4, value === 0 ? "grey" : value < 0 ? "blue" : "orange", `${tenth(1000 * value)}, code ${codes[i]}, means ${tenth(1000 * levels[codes[i]])}`), text(x(i), PLOT + 14 + (crowded ? 12 * (i % 2) : 0), codes[i], "small middle"),
      ]), text(from - 4, PLOT + 14, "code", "small soft end")),
  ];

  // 4. What comes back. Rotated channels can be turned back only when all of them are there.
  const ready = (t, c) => last || (per_key ? t <= index : !p.rotation && c <= index), scored = (t) => last || (per_key && t <= index);
  const back = [
    text(0, 0, "4 · read back", "bold"), text(column, 0, "score now", "small soft end"),
    part(0, 8, ...map(restored, 3, cell, ready), ...trace.restored_scores_milli.map((score, t) => (scored(t) ? text(column - 4, t * ROW + 12, tenth(score), `small end${last && t === trace.finds ? ` bold ${verdict}` : ""}`) : null)), last ? row_frame(trace.finds, verdict) : null),
  ];
  const all = trace.finds_each.flatMap((found, i) => {
    const css = !last ? "grey faint" : found === trace.should_each[i] ? "green" : "red", at = (i * width) / 8;
    return [rect(at + 1, 10, width / 8 - 3, 20, `box ${css}`, `the query made for key ${i} should find key ${trace.should_each[i]}`), ...(i === p.needle ? [rect(at - 1, 8, width / 8 + 1, 24, "outline accent")] : []), last ? text(at + width / 16, 24, `${wide ? "key " : ""}${found}`, "small middle") : null];
  });

  const upper = 8 * ROW + 50, lower = PLOT + (crowded ? 56 : 44), x2 = width - column;
  const [places, bottom] = wide ? [[[0, 14], [x2, 14], [x2, 14 + upper], [0, 14 + upper]], 14 + upper + lower] : [[[0, 14], [0, 14 + upper], [0, 14 + 2 * upper], [0, 14 + 2 * upper + lower]], 14 + 2 * upper + 2 * lower - 12];
  const scale = (trace.scale_milli[g] / 1000).toFixed(3), lowest = Math.min(...trace.restored_scores_milli), highest = Math.max(...trace.restored_scores_milli);
  const says = () => {
    const who = `${p.rotation ? "Rotated " : ""}${per_key ? "key" : "channel"} ${g}`, reach = `reaches from ${tenth(1000 * Math.min(...values))} to ${tenth(1000 * Math.max(...values))}`;
    if (!last) return `${who[0].toUpperCase()}${who.slice(1)} ${reach}, so ${levels.length} levels lie ${scale} apart. ${used} of them ${used === 1 ? "is" : "are"} used.`;
    const blind = highest - lowest < 100 ? ` All scores lie between ${minus((lowest / 1000).toFixed(3))} and ${minus((highest / 1000).toFixed(3))}.` : "";
    return `The query finds key ${trace.finds}${verdict === "green" ? ", as it should" : ` instead of key ${trace.should_find}`}.${blind} ${trace.found === 8 ? "All eight" : `Of all eight queries, ${trace.found}`} find${trace.found === 1 ? "s" : ""} the right key.`;
  };
  return {
    picture: [
      svg(width, bottom + 42, `Eight keys before and after ${p.bits} bits; ${name} on its levels. The query made for key ${p.needle} finds key ${trace.finds}.`,
        ...[keys, kept, plot, back].map((shapes, i) => part(...places[i], ...shapes)), part(0, bottom + 6, text(0, 2, "5 · what each of the eight queries finds", "bold"), ...all)),
      legend(["blue", "an element below zero"], ["orange", "above zero"], ["purple", `the ${per_key ? "key" : "channel"} on its levels`]),
      numbers([`${trace.found} of 8`, "queries find the right key", trace.found === 8 ? "green" : "red"], [tenth(trace.largest_error_milli), "largest error of an element"], [`${trace.bytes} bytes`, `scales included; ${trace.bytes_bf16} in bf16`]),
    ],
    text: says(),
  };
}
