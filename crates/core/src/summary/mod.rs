//! What remains of a set of tokens, and how two sets merge.
//!
//! | module | what it holds | paper |
//! | --- | --- | --- |
//! | [`winner`] | [`Winner`](winner::Winner), [`TopList`](winner::TopList): maxima of perturbed scores | Lemma D.5 |
//! | [`log_mass`], [`mass_histogram`] | streaming and order-independent log-sum-exp | App. L |
//! | [`group_summary`] | [`GroupSummary`](group_summary::GroupSummary) and its binary merge | Lemma D.3 |
//! | [`frontier`] | [`Frontier`](frontier::Frontier): the winner above every threshold at once | |
//! | [`moments`] | mean and deviation of a row, order-independent | |

pub mod frontier;
pub mod group_summary;
pub mod log_mass;
pub mod mass_histogram;
pub mod moments;
pub mod winner;
