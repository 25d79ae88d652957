// Time runs to the right. A bar is a step: as wide as it takes, as high as it has tokens. Below: when a stream gets its tokens.

export function steps(trace) {
  return trace.start_us.length;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, number, numbers, legend, count } = kit;
  const { params: p, start_us, decodes, chunk, short_chunk, arrival_us } = trace, narrow = kit.width < 480;
  const ends = [...start_us.slice(1), trace.end_us], ms = (us) => `${number(us / 1000, us < 100_000 ? 1 : 0)} ms`;
  const left = narrow ? 0 : 92, px = (kit.width - left) / trace.end_us, top = 26, high = 150, base = top + high;
  const totals = decodes.map((n, i) => n + chunk[i] + short_chunk[i]), most = Math.max(p.budget < 2 * Math.max(...totals) ? p.budget : 0, ...totals);
  const py = high / most, shapes = [], x = (us) => left + us * px;

  const budget = base - p.budget * py;
  if (p.budget <= most) shapes.push(line(left, budget, kit.width, budget, "ink dashed"), text(kit.width, budget - 5, `budget ${number(p.budget)}`, "small end"));
  start_us.forEach((start, i) => {
    const w = (ends[i] - start) * px, inner = w - (w > 3 ? 1 : 0), faint = i > index ? " faint" : "";
    let y = base;
    for (const [n, css] of [[decodes[i], "blue"], [chunk[i], "orange"], [short_chunk[i], "purple"]]) {
      const h = n ? Math.max(2, n * py) : 0;
      y -= h;
      if (h) shapes.push(rect(x(start), y, inner, h, css + faint, `step ${i}, ${ms(ends[i] - start)}: ${decodes[i]} decodes, ${chunk[i]} of the long prompt${short_chunk[i] ? `, ${short_chunk[i]} of the short one` : ""}`));
    }
    if (i === index) shapes.push(rect(x(start) - 1, top, Math.max(3, w + 1), high, "outline accent"));
  });
  shapes.push(line(left, base, kit.width, base, "ink"));
  if (!narrow) shapes.push(text(left - 10, base - high / 2 - 2, "tokens", "small soft end"), text(left - 10, base - high / 2 + 12, "in the step", "small soft end"));

  // Two lanes: a running stream's tokens, one at each step's end, and the newcomer's wait.
  const lane = (row, name, ...inside) => {
    const y = base + 16 + row * (narrow ? 46 : 34);
    shapes.push(text(narrow ? 0 : left - 10, narrow ? y + 8 : y + 13, name, narrow ? "small soft" : "small soft end"));
    const top_of = narrow ? y + 14 : y;
    shapes.push(rect(left, top_of, kit.width - left, 18, "free"), ...inside.flatMap((make) => make(top_of)));
  };
  const gap = ends.reduce((best, end, i) => (decodes[i] && end > arrival_us && (best < 0 || end - start_us[i] > ends[best] - start_us[best]) ? i : best), -1);
  lane(0, trace.silent_streams ? "served stream" : "a stream",
    (y) => (gap >= 0 && trace.worst_gap_us && p.decoders && index >= gap ? [rect(x(start_us[gap]), y, (ends[gap] - start_us[gap]) * px, 18, "box red", `silent for ${ms(trace.worst_gap_us)}`)] : []),
    (y) => ends.slice(0, index + 1).filter((_, i) => decodes[i]).map((end) => rect(x(end) - 1, y + 2, 2, 14, "blue")));
  const first = trace.ttft_us === null ? trace.end_us : arrival_us + trace.ttft_us, now = ends[index];
  lane(1, "long prompt", (y) => (now > arrival_us ? [rect(x(arrival_us), y, (Math.min(first, now) - arrival_us) * px, 18, "box orange", "waits for its first token"), ...(now >= first && trace.ttft_us !== null ? [rect(x(first) - 1, y, 3, 18, "orange")] : [])] : []));
  if (p.short_prompt && trace.short_ttft_us) {
    const short = arrival_us + trace.short_ttft_us;
    lane(2, "short prompt", (y) => (now > arrival_us ? [rect(x(arrival_us), y, (Math.min(short, now) - arrival_us) * px, 18, "box purple"), ...(now >= short ? [rect(x(short) - 1, y, 3, 18, "purple")] : [])] : []));
  }
  const lanes = 2 + Boolean(p.short_prompt && trace.short_ttft_us), bottom = base + 16 + lanes * (narrow ? 46 : 34);
  const late = x(arrival_us) > kit.width - 150;
  shapes.push(line(x(arrival_us), top, x(arrival_us), bottom - 8, "orange dashed"), text(x(arrival_us) + (late ? -4 : 4), 12, "the long prompt arrives", `small orange${late ? " end" : ""}`));
  shapes.push(text(left, bottom + 8, "0", "small soft"), text(kit.width, bottom + 8, ms(trace.end_us), "small soft end"));

  const last = index === start_us.length - 1, starved = last && trace.starved;
  return {
    picture: [
      svg(kit.width, bottom + 14, `${index + 1} steps up to ${ms(now)}. This step: ${decodes[index]} decodes and ${chunk[index]} tokens of the prompt.`, ...shapes),
      legend(["blue", trace.silent_streams ? "one token of each stream that gets one" : "one token of each stream"], ["orange", "a chunk of the long prompt"], ...(p.short_prompt ? [["purple", "the short prompt"]] : []), ["red", "the streams' longest silence"]),
      numbers([trace.ttft_us === null ? "never" : ms(trace.ttft_us), "first token of the long prompt", trace.starved ? "red" : ""], trace.silent_streams ? [`${trace.silent_streams} of ${p.decoders}`, "streams never get a token", "red"] : [p.decoders ? ms(trace.worst_gap_us) : "–", "a stream's longest silence"],
        ...(p.short_prompt ? [[trace.short_ttft_us ? ms(trace.short_ttft_us) : "never", "first token of the short one"]] : []), [number(start_us.length), "steps"]),
    ],
    text: (starved ? `The ${p.decoders} streams use up all ${p.budget} tokens of every step. The prompt never starts, and never will.`
      : `Step ${index} takes ${ms(ends[index] - start_us[index])}: ${count(decodes[index], "decode")}${!chunk[index] ? "" : start_us[index] >= first && trace.ttft_us !== null ? " and the newcomer's next token" : ` and ${count(chunk[index], "token")} of the long prompt`}${short_chunk[index] ? ` and ${number(short_chunk[index])} of the short one` : ""}.`)
      + (last && trace.silent_streams ? ` ${trace.silent_streams} of the streams get no token at all.` : ""),
  };
}
