//! Filters, penalties and masks against the plain draw on the same rows.
//!
//! | module | content |
//! | --- | --- |
//! | [`cases`] | the parameters of a row, and draws of such rows |
//! | [`inputs`] | the kinds of logits, and a head with hidden states of each kind |
//! | [`cpu`] | contenders on the CPU, and the rows that one pass decides |
//! | `cuda` | contenders on a GPU (feature `cuda`) |
//! | `whole_calls` | whole calls on a GPU, with second passes (feature `cuda`) |
//! | [`table`] | times, ratios and passes as text |

pub mod cases;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod inputs;
pub mod table;
#[cfg(feature = "cuda")]
pub mod whole_calls;
