/** The one door to the libraries: everything that draws imports from here. */

import { h } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { render } from "./vendor/preact.js";
export * from "./vendor/hooks.js";
export { follow, signal } from "./shell/signal.js";

export const html = htm.bind(h);
