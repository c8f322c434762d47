//! The bytes that ranks exchange.
//!
//! ```text
//! message   call | row ...                                    the first exchange of a call
//!           magic u32 | 2 u8 | rows u32 | row ...             a further pass
//!           magic u32 | 1 u8 | text                           the rank failed
//! ```
//!
//! The head of a message: [`call`]. Rows of the first exchange: [`summary`]; rows of a further pass: [`pass`].

pub(crate) mod call;
pub(crate) mod pass;
pub(crate) mod summary;
pub(crate) mod wire;
