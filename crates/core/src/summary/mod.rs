//! Summaries of sets of tokens, and their merges.
//!
//! | module | content | paper |
//! | --- | --- | --- |
//! | [`winner`] | [`Winner`](winner::Winner), [`TopList`](winner::TopList): maxima of perturbed scores | Lemma D.5 |
//! | [`log_mass`], [`mass_histogram`] | streaming and order-independent log-sum-exp | App. L |
//! | [`group_summary`] | [`GroupSummary`](group_summary::GroupSummary) and its binary merge | Lemma D.3 |
//! | [`frontier`] | [`Frontier`](frontier::Frontier): the winner above every threshold at once | |
//! | [`moments`] | mean and deviation of a row, order-independent | |

pub(crate) mod frontier;
pub(crate) mod group_summary;
pub(crate) mod log_mass;
pub(crate) mod mass_histogram;
pub(crate) mod moments;
pub(crate) mod winner;
