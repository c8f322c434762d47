//! The bytes that ranks exchange.
//!
//! A message has a head ([`call`]): the call of a rank, a further pass, or the rank's status. The summaries of rows
//! follow ([`summary`]), one for each request. [`wire`] has the bytes of single values.

pub(crate) mod call;
pub(crate) mod summary;
pub(crate) mod wire;
