// Eight keys before and after: as attention would like them, and as they are read back, with the scores of one query beside each.
// A purple frame goes from group to group, which is what shares a scale: a key, or a channel. Below: what each query finds.

const ROW = 17, MARGIN = 14, SCORES = 46;

export function steps(trace) {
  return trace.scale_milli.length + 1; // each group, and the search
}

export function draw(trace, index, kit) {
  const { svg, rect, text, key, group: part, shape, legend, number, numbers } = kit, p = trace.params, width = kit.width;
  const per_key = p.group === "token", last = index === steps(trace) - 1, g = last ? p.needle : index;
  const minus = (string) => (Number(string) === 0 ? string.replace("-", "") : string.replace("-", "−")), tenth = (milli) => minus(number(milli / 1000, 1));
  const wide = width >= 560, column = wide ? (width - 30) / 2 : width, cell = (column - MARGIN - SCORES) / 16, right = MARGIN + 16 * cell;
  const verdict = trace.finds === trace.should_find ? "green" : "red", restored = trace.restored_milli.map((row) => row.map((x) => x / 1000));

  // Eight rows of sixteen cells: teal below zero, blue above, the stronger the further.
  const map = (rows, ready = () => true) => rows.flatMap((row, t) => [
    text(9, t * ROW + 13, t, "small soft end"),
    ...row.flatMap((x, c) => {
      const at = { x: MARGIN + c * cell, y: t * ROW, width: cell - 1, height: ROW - 1 };
      if (!ready(t, c)) return [rect(at.x, at.y, at.width, at.height, "free faint")];
      const strength = Math.min(1, Math.abs(x) / 3).toFixed(2), label = shape("title", {}, `key ${t}, channel ${c}: ${tenth(1000 * x)}`);
      return [rect(at.x, at.y, at.width, at.height, "free"), shape("rect", { ...at, class: x < 0 ? "teal" : "blue", "fill-opacity": strength }, label)];
    }),
    ...row.map((x, c) => (ready(t, c) && Math.abs(x) > 30 ? text(MARGIN + (c + 0.5) * cell, t * ROW + 12, minus(x.toFixed(0)), "small middle halo") : null)),
  ]);
  const row_frame = (t, css) => rect(MARGIN - 2, t * ROW - 1, right - MARGIN + SCORES + 2, ROW + 1, `outline ${css}`);
  const frame = per_key ? rect(MARGIN - 2, g * ROW - 2, 16 * cell + 3, ROW + 3, "outline purple") : rect(MARGIN + g * cell - 2, -2, cell + 3, 8 * ROW + 3, "outline purple");

  const query = () => trace.query.map((sign, c) => text(MARGIN + (c + 0.5) * cell, 17, sign > 0 ? "+" : sign < 0 ? "−" : "0", "small middle"));
  const wanted = [
    text(0, 0, "before", "bold"), text(column, 17, "score", "small soft end"), ...query(), text(9, 17, "q", "small soft end"),
    part(0, 24, ...map(trace.keys), ...trace.scores.map((score, t) => text(column - 4, t * ROW + 13, minus(String(score)), `small end${t === trace.should_find ? " bold green" : ""}`)), row_frame(trace.should_find, "green")),
  ];

  // What comes back. Rotated channels can be turned back only when all of them are there.
  const ready = (t, c) => last || (per_key ? t <= index : !p.rotation && c <= index), scored = (t) => last || (per_key && t <= index);
  const back = [
    text(0, 0, `after ${p.bits} bits${p.rotation ? ", rotated" : ""}`, "bold"), text(column, 17, "score", "small soft end"), ...query(), text(9, 17, "q", "small soft end"),
    part(0, 24, ...map(restored, ready), ...trace.restored_scores_milli.map((score, t) => (scored(t) ? text(column - 4, t * ROW + 13, tenth(score), `small end${last && t === trace.finds ? ` bold ${verdict}` : ""}`) : null)),
      last ? key("found", row_frame(trace.finds, verdict)) : key("scale", frame)),
  ];

  const high = 24 + 8 * ROW, bottom = wide ? 14 + high + 20 : 14 + 2 * high + 40;
  const all = trace.finds_each.flatMap((found, i) => {
    const css = !last ? "grey faint" : found === trace.should_each[i] ? "green" : "red", x = (i * width) / 8;
    return [rect(x + 1, 8, width / 8 - 3, 20, `box ${css}`, `the query made for key ${i} should find key ${trace.should_each[i]}`), ...(i === p.needle ? [key("query", rect(x - 1, 6, width / 8 + 1, 24, "outline accent"))] : []), last ? text(x + width / 16, 22, `${wide ? "key " : ""}${found}`, "small middle") : null];
  });
  const lowest = Math.min(...trace.restored_scores_milli), highest = Math.max(...trace.restored_scores_milli);
  const says = () => {
    if (!last) return `${p.rotation ? "Rotated " : ""}${per_key ? "key" : "channel"} ${g} shares a scale: its ${2 ** p.bits} levels lie ${(trace.scale_milli[g] / 1000).toFixed(3)} apart.`.replace(/^[a-z]/, (letter) => letter.toUpperCase());
    const blind = highest - lowest < 100 ? ` All scores lie between ${minus((lowest / 1000).toFixed(3))} and ${minus((highest / 1000).toFixed(3))}.` : "";
    return `The query finds key ${trace.finds}${verdict === "green" ? ", as it should" : ` instead of key ${trace.should_find}`}.${blind} ${trace.found === 8 ? "All eight" : `Of all eight queries, ${trace.found}`} find${trace.found === 1 ? "s" : ""} the right key.`;
  };
  return {
    picture: [
      svg(width, bottom + 32, `Eight keys before and after ${p.bits} bits. The query made for key ${p.needle} finds key ${trace.finds}.`,
        part(0, 14, ...wanted), part(wide ? width - column : 0, wide ? 14 : 14 + high + 24, ...back), part(0, bottom, text(0, 0, "what each of the eight queries finds", "small soft"), ...all)),
      legend(["teal", "below zero"], ["blue", "above"], last ? [verdict, verdict === "green" ? "found" : "found, and wrong"] : ["purple", "shares a scale"]),
      numbers([last ? `${trace.found} of 8` : "–", "queries find the right key", last ? (trace.found === 8 ? "green" : "red") : ""], [last ? tenth(trace.largest_error_milli) : "–", "largest error"], [`${trace.bytes} bytes`, `of ${trace.bytes_bf16} in bf16`]),
    ],
    text: says(),
  };
}
