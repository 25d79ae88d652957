// The same prompt twice on one clock: above in one step, below in chunks. A bar is a step: as wide as it takes, as high as it has tokens.

const AXIS = 1_250_000, MOST = 4200; // µs to the right, tokens upwards: the same for every run

export function steps(trace) {
  return trace.start_us.length;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, key, number, numbers, legend, count } = kit;
  const { params: p, whole, arrival_us } = trace, narrow = kit.width < 480, shapes = [];
  const ms = (us) => `${number(us / 1000, us < 100_000 ? 1 : 0)} ms`;
  const left = narrow ? 52 : 84, wide = kit.width - left, x = (us) => left + (Math.min(us, AXIS) / AXIS) * wide;
  const last = index === trace.start_us.length - 1, starved = last && trace.starved, titles = [];
  const high = 84, lanes = 2 + Boolean(p.short_prompt) + Boolean(trace.silent_streams), track = 18 + high + lanes * 18 + 12;
  const ends_of = (run) => [...run.start_us.slice(1), run.end_us], ends = ends_of(trace), now = ends[index];

  /** The longest silence so far of a stream that is served, the one that goes on included: [start, end], or null. */
  const silence = (run, until) => ends_of(run).reduce((best, end, i) => (run.decodes[i] && p.decoders && end > arrival_us && run.start_us[i] < until && (!best || Math.min(end, until) - run.start_us[i] > best[1] - best[0]) ? [run.start_us[i], Math.min(end, until)] : best), null);

  const draw_track = (run, top, name, title, now) => {
    const over = ends_of(run), base = top + 18 + high;
    titles.push(text(left, top + 10, title, "small bold halo"));
    shapes.push(line(left, base, kit.width, base, "ink"));
    if (!narrow) shapes.push(text(left - 8, base - high / 2 - 3, "tokens", "small soft end"), text(left - 8, base - high / 2 + 11, "in a step", "small soft end"));
    run.start_us.forEach((start, i) => {
      if (start >= AXIS) return;
      const w = x(over[i]) - x(start), faint = over[i] > now ? " faint" : "";
      let y = base;
      for (const [n, css] of [[run.decodes[i], "blue"], [run.chunk[i], "orange"], [run.short_chunk[i], "purple"]]) {
        const h = n ? Math.max(2, (n / MOST) * high) : 0;
        y -= h;
        const said = `step ${i}, ${ms(over[i] - start)}: ${run.decodes[i]} decodes, ${run.chunk[i]} of the long prompt${run.short_chunk[i] ? `, ${run.short_chunk[i]} of the short one` : ""}`;
        if (h) shapes.push(key(`${name} ${i} ${css}`, rect(x(start), y, w - (w > 3 ? 1 : 0), h, css + faint, said)));
      }
    });
    let y = base + 5;
    const lane = (label, ...inside) => {
      shapes.push(text(left - 8, y + 11, label, "small soft end"), rect(left, y, wide, 14, "free"), ...inside);
      y += 18;
    };
    const quiet = silence(run, now), beside = (us, words, css) => {
      const at = Math.min(x(us) + 5, kit.width - 6.6 * words.length); // at the right edge it stands on what is drawn there
      return kit.shape("g", {}, ...(at < x(us) ? [rect(at - 3, y, kit.width - at + 3, 14, "free")] : []), text(at, y + 11, words, `small halo ${css}`));
    };
    lane(narrow ? "stream" : "a stream", ...(quiet && quiet[0] < AXIS ? [key(`${name} silence`, rect(x(quiet[0]), y, x(quiet[1]) - x(quiet[0]), 14, "box red", `silent for ${ms(quiet[1] - quiet[0])}`))] : []),
      ...over.filter((end, i) => run.decodes[i] && end <= now && end < AXIS).map((end) => rect(x(end) - 1, y + 1, 2, 12, "blue")),
      ...(quiet ? [beside(Math.min(AXIS, Math.max(...over.filter((end) => end <= now))), `silent for ${ms(quiet[1] - quiet[0])}`, "red bold")] : []));
    if (run.silent_streams) lane(narrow ? `${run.silent_streams} more` : `${run.silent_streams} streams`, ...(now > arrival_us ? [rect(left, y, starved ? wide : x(now) - left, 14, "hatch red"), beside(now + 60_000, "no token at all", "red bold")] : []));
    const wait = (label, css, ttft) => {
      const first = ttft === null ? Infinity : arrival_us + ttft, never = run.starved && now >= run.end_us;
      lane(label, ...(now > arrival_us ? [key(`${name} ${css}`, rect(x(arrival_us), y, never ? kit.width - x(arrival_us) : x(Math.min(first, now)) - x(arrival_us), 14, never ? "hatch red" : `box ${css}`, "waits for its first token"))] : []),
        ...(now >= first && first < AXIS ? [rect(x(first) - 1.5, y, 3, 14, css)] : []),
        ...(never ? [beside(now + 60_000, "never starts", "red bold")] : now >= first ? [beside(Math.min(first, AXIS), `first token after ${ms(ttft)}`, css)] : []));
    };
    wait(narrow ? "prompt" : "long prompt", "orange", run.ttft_us);
    if (p.short_prompt) wait(narrow ? "short" : "short prompt", "purple", run.short_ttft_us);
  };
  draw_track(whole, 0, "whole", `Whole: ${number(p.prompt + p.short_prompt)} tokens in one step`, starved ? whole.end_us : now); // who starves does so for ever: the other run is over
  const second = track - (trace.silent_streams ? 18 : 0);
  draw_track(trace, second, "chunks", `Budget of ${count(p.budget, "token")} a step`, now);
  const bottom = second + track - 8;
  shapes.push(line(x(arrival_us), 16, x(arrival_us), bottom - 2, "orange dashed"), line(x(now), 16, x(now), bottom - 2, "ink"));
  for (let t = 0; t <= 1200; t += narrow ? 400 : 200) shapes.push(text(Math.min(x(t * 1000), kit.width - 16), bottom + 10, t ? number(t) : "0 ms", `small soft ${t === 0 ? "" : "middle"}`));
  shapes.push(...titles);

  const { start_us, decodes, chunk, short_chunk } = trace, first = trace.ttft_us === null ? Infinity : arrival_us + trace.ttft_us;
  const quiet = silence(trace, now), waited = (ttft) => (ttft !== null && now >= arrival_us + ttft ? ms(ttft) : starved ? "never" : now > arrival_us ? `${ms(now - arrival_us)} …` : "–");
  return {
    picture: [
      svg(kit.width, bottom + 14, `${index + 1} steps up to ${ms(now)}. This step: ${decodes[index]} decodes and ${chunk[index]} tokens of the prompt.`, ...shapes),
      legend(["blue", "a token of each stream"], ["orange", "the long prompt"], ...(p.short_prompt ? [["purple", "the short prompt"]] : []), ["red", "silence"], ["ink", "line: now"]),
      numbers([waited(trace.ttft_us), "first token of the long prompt", starved ? "red" : ""], last && trace.silent_streams ? [`${trace.silent_streams} of ${p.decoders}`, "streams never get a token", "red"] : [quiet ? ms(quiet[1] - quiet[0]) : "–", "longest silence of a stream"],
        ...(p.short_prompt ? [[waited(trace.short_ttft_us), "first token of the short one", starved ? "red" : ""]] : []), [number(index + 1), index ? "steps" : "step"]),
    ],
    text: (starved ? `The ${p.decoders} streams use all ${p.budget} tokens of every step, and the prompt never starts.`
      : `Step ${index} takes ${ms(now - start_us[index])}: ${count(decodes[index], "decode")}${!chunk[index] ? "" : start_us[index] >= first ? " and the newcomer’s next token" : ` and ${count(chunk[index], "token")} of the long prompt`}${short_chunk[index] ? ` and ${number(short_chunk[index])} of the short one` : ""}.`)
      + (last && trace.silent_streams ? ` ${trace.silent_streams} of the streams get no token at all.` : ""),
  };
}
