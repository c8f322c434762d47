//! The ranks that share a vocabulary, as a Python object that exchanges bytes between the ranks.

use crate::error::invalid;
use core::mem::replace;
use core::time::Duration;
use flash_sampling::distributed::{Transport, TransportError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

/// A group of ranks over a Python object. The object has the attributes `rank`, `world` and `time_limit` (in seconds),
/// and the method `all_gather(message, time_limit)`, which returns the messages of all ranks.
pub(crate) struct Group {
    object: Py<PyAny>,
    rank: usize,
    world: usize,
    limit: Duration,
    /// Whether an exchange failed. The group then refuses further exchanges.
    is_broken: bool,
}

impl Group {
    /// Makes a group from the attributes of a Python object.
    ///
    /// # Errors
    /// An attribute is missing, or has an invalid value.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Group> {
        for name in ["rank", "world", "time_limit", "all_gather"] {
            if !object.hasattr(name)? {
                return Err(invalid("group", format!("group has no attribute {name}")));
            }
        }
        let (rank, world): (usize, usize) = (object.getattr("rank")?.extract()?, object.getattr("world")?.extract()?);
        if rank >= world {
            return Err(invalid("group", format!("group has rank {rank} of {world} ranks, but ranks begin at 0")));
        }
        let seconds: f64 = object.getattr("time_limit")?.extract()?;
        let limit = Duration::try_from_secs_f64(seconds).map_err(|_| {
            invalid("group", format!("group has time_limit {seconds:?}, but must have a duration in seconds"))
        })?;
        Ok(Group { object: object.clone().unbind(), rank, world, limit, is_broken: false })
    }

    /// Calls the object's `all_gather`, and copies the messages that it returns.
    fn gather(&self, mine: &[u8], all: &mut Vec<Vec<u8>>) -> PyResult<()> {
        Python::attach(|py| {
            let arguments = (PyBytes::new(py, mine), self.limit.as_secs_f64());
            let messages = self.object.bind(py).call_method1("all_gather", arguments)?;
            let messages = messages.cast::<PyList>()?;
            all.resize_with(messages.len(), Vec::new);
            for (message, all) in messages.iter().zip(all) {
                all.clear();
                all.extend_from_slice(message.cast::<PyBytes>()?.as_bytes());
            }
            Ok(())
        })
    }
}

impl Transport for Group {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn time_limit(&self) -> Duration {
        self.limit
    }

    fn set_time_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    fn all_gather(&mut self, mine: &[u8], all: &mut Vec<Vec<u8>>) -> Result<(), TransportError> {
        if replace(&mut self.is_broken, true) {
            return Err(TransportError::Broken);
        }
        self.gather(mine, all).map_err(|error| TransportError::Failed { source: Box::new(error) })?;
        self.is_broken = false;
        Ok(())
    }
}
