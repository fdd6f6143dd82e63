// The run's history as columns that grow at their ends.

const GROUPS = [
  ["step", "loss", "tokens_per_s"],
  ["held_out_step", "held_out_loss"],
  ["view_step"],
];

export function emptyHistory() {
  return Object.fromEntries(GROUPS.flat().map((name) => [name, []]));
}

/** The history with what is new; from row 0 on, what was there is replaced. */
export function appendHistory(history, grown) {
  const result = {};
  for (const group of GROUPS) {
    const from = grown[`${group[0]}_from`];
    for (const name of group) result[name] = history[name].slice(0, from).concat(grown[name]);
  }
  return result;
}

/** Means of up to `span` values around each one; fewer at both ends. */
export function smoothed(values, span) {
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  const reach = Math.floor(span / 2);
  return values.map((_, at) => {
    const near = Math.min(reach, at, values.length - 1 - at);
    return (sums[at + near + 1] - sums[at - near]) / (2 * near + 1);
  });
}
