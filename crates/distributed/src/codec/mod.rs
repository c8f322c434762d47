//! The bytes that ranks exchange.
//!
//! A message has a head ([`call`]): the call of a rank, a further pass, or the rank's status. The summaries of rows
//! follow ([`summary`]), one for each request; [`parts`] has their draws, lists and masses, [`wire`] single values.

pub(crate) mod call;
mod parts;
pub(crate) mod summary;
pub(crate) mod wire;
